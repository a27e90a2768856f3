"""The norm of all gradients, over all stages and replicas, each parameter once: that of the model before it was cut."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from penstock.batch.batch import precise_on
from penstock.errors import RunError
from penstock.front.mesh import PipelineMesh
from penstock.run.feed import pinned
from penstock.stage.dtensors import summed, to_local


class Local(NamedTuple):
    """What this rank knows of a norm before it hears of the others."""

    term: Tensor  # of plain gradients
    spread: list[Tensor]  # DTensors
    norm_type: float


def local_norm(gradients: Iterable[Tensor], max_norm: object, norm_type: object, device: torch.device) -> Local:
    """Before any rank waits for another: all that can be wrong on one of them alone."""
    if isinstance(max_norm, Tensor) and max_norm.numel() == 1:
        max_norm = max_norm.item()
    if not isinstance(max_norm, int | float) or not max_norm >= 0:
        raise RunError(f"max_norm={max_norm!r}; expected a number from 0, the largest norm that may be")
    try:
        kind = float(norm_type) if isinstance(norm_type, int | float | str) else math.nan
    except ValueError:
        kind = math.nan
    if not kind > 0:
        raise RunError(f"norm_type={norm_type!r}; expected a number above 0, or math.inf")
    sharded: dict[bool, list[Tensor]] = {False: [], True: []}
    for grad in gradients:
        sharded[hasattr(grad, "placements")].append(grad)
    return Local(_term([numbers_of(grad) for grad in sharded[False]], kind, device), sharded[True], kind)


def total_norm(local: Local, ends: PipelineMesh, *, scaler: object = None) -> float:
    """The norm of the gradients that count here and of those on the other ranks, each of which has its own part by now.

    The host reads one tensor: a sum, and what a GradScaler would read of its own after this.
    """
    norm_type, terms = local.norm_type, [local.term]
    largest = math.isinf(norm_type)
    with ends.among_replicas():
        for (mesh, dims), parts in _by_shards(local.spread).items():
            terms.append(_term(parts, norm_type, ends.device))
            for dim in dims:
                most = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
                dist.all_reduce(terms[-1], most, group=mesh.get_group(dim))
        here = torch.stack(terms)
        here = (here.max() if largest else here.sum()).reshape(1)
        found = unread(scaler)
        flags = [by_device[place].reshape(1).to(here) for by_device, place in found]
        number, *infinite = ends.transport.read(torch.cat([here, *flags]))
        for (by_device, place), flag in zip(found, infinite, strict=True):
            # Where it was: the scaler then asks no device, and copies it back without a wait.
            by_device[place] = pinned(torch.full((), flag, dtype=torch.float32))
        everywhere = torch.tensor(ends.own.all_gather("clip_grad_norm_()", number), dtype=torch.float64)
    return float(everywhere.max()) if largest else float(everywhere.sum()) ** (1 / norm_type)


def _by_shards(gradients: Iterable[Tensor]) -> dict[tuple[DeviceMesh, tuple[int, ...]], list[Tensor]]:
    """The local parts of DTensors, by the dimensions of a mesh over which they are shards; a sum over ranks is made first."""
    found: dict[tuple[DeviceMesh, tuple[int, ...]], list[Tensor]] = {}
    for grad in map(summed, gradients):
        dims = tuple(dim for dim, placement in enumerate(grad.placements) if not placement.is_replicate())
        found.setdefault((grad.device_mesh, dims), []).append(to_local(grad))
    return found


def numbers_of(grad: Tensor) -> Tensor:
    """What this rank has of a gradient; of a sparse one, the rows that are there."""
    local = to_local(grad).detach()
    return local.coalesce().values() if local.is_sparse else local


def _term(tensors: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The largest norm, or the sum of the norms' powers, in one tensor: a few kernels for all of them."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    precise = precise_on(device)
    if not filled:
        return torch.zeros((), dtype=precise, device=device)
    norms = torch.stack([size.to(device, precise) for size in torch._foreach_norm(filled, norm_type)])
    return norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum()


def unread(scaler: object) -> list[tuple[dict[torch.device, Tensor], torch.device]]:
    """Where a scaler that has unscaled gradients keeps, on a device, whether it met infinite ones. It reads that in `step`."""
    states = getattr(scaler, "_per_optimizer_states", {}).values()
    findings = [state["found_inf_per_device"] for state in states]
    return [(found, place) for found in findings for place in found if found[place].device.type != "cpu"]


@torch.no_grad()
def overflow(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Whether some number in the gradients of this rank is not finite, as 1 or 0 on the device."""
    largest = _term([numbers_of(grad) for grad in gradients], math.inf, device)
    return largest.isfinite().logical_not().to(largest.dtype).reshape(1)


@torch.no_grad()
def spoil_if(flag: Tensor, gradients: Sequence[Tensor]) -> None:
    """Make a gradient infinite if the flag on the device is more than 0: a GradScaler then skips the step here too."""
    local = (to_local(grad) for grad in gradients)
    values = (grad._values() if grad.is_sparse else grad for grad in local)
    first = next((grad for grad in values if grad.numel()), None)  # the shard of a rank may be empty
    if first is not None:
        first.add_(torch.where(flag.reshape(()) > 0, math.inf, 0.0).to(first.device, first.dtype))


@torch.no_grad()
def shrink(gradients: Iterable[Tensor], factor: float) -> None:
    """Multiply in place by the factor, if it is below 1."""
    local = [to_local(grad) for grad in gradients]
    local = [grad._values() if grad.is_sparse else grad for grad in local]
    if local and factor < 1.0:
        torch._foreach_mul_(local, factor)
