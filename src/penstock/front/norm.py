"""The norm of all gradients, over all stages and replicas, each parameter once: that of the model before it was cut."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import RunError
from penstock.front.ends import Ends
from penstock.run.feed import pinned
from penstock.stage.dtensors import to_local, whole_tensor


def total_norm(gradients: Iterable[Tensor], ends: Ends, *, norm_type: float = 2.0, scaler: object = None) -> float:
    """The norm of the gradients that count here and of those on the other ranks.

    The host reads one tensor: two sums, and what a GradScaler would read of its own after this.
    """
    if not norm_type > 0:
        raise RunError(f"norm_type={norm_type}; expected a number above 0, or math.inf")
    sharded: dict[bool, list[Tensor]] = {False: [], True: []}
    whole = list(gradients)
    for grad in whole:
        sharded[hasattr(grad, "placements")].append(to_local(grad).detach())
    sums = torch.stack([_term(some, norm_type, ends.device) for some in sharded.values()])
    largest = math.isinf(norm_type)
    with ends.among_replicas():
        if ends.beside:
            # DTensors on meshes of several kinds: each knows which ranks hold what of it.
            dtensors = [grad.detach() for grad in whole if hasattr(grad, "placements")]
            norms = [whole_tensor(torch.linalg.vector_norm(grad, norm_type)).to(ends.device) for grad in dtensors]
            sums[1] = _term(norms, norm_type, ends.device)
        elif ends.num_replicas > 1:
            most = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            dist.all_reduce(sums[1:], most, group=ends.copies)
        found = unread(scaler)
        flags = [by_device[place].reshape(1).to(sums) for by_device, place in found]
        unsharded, spread, *infinite = ends.transport.read(torch.cat([sums, *flags]))
        for (by_device, place), flag in zip(found, infinite, strict=True):
            # Where it was: the scaler then asks no device, and copies it back without a wait.
            by_device[place] = pinned(torch.full((), flag, dtype=torch.float32))
        here = max(unsharded, spread) if largest else unsharded + spread
        everywhere = torch.tensor(ends.of_each("clip_grad_norm_()", here), dtype=torch.float64)
    return float(everywhere.max()) if largest else float(everywhere.sum()) ** (1 / norm_type)


def _term(tensors: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The largest norm, or the sum of the norms' powers, in one tensor: a few kernels for all of them."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    precise = precise_on(device)
    if not filled:
        return torch.zeros((), dtype=precise, device=device)
    norms = torch.stack([size.to(device, precise) for size in torch._foreach_norm(filled, norm_type)])
    return norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum()


def precise_on(device: torch.device) -> torch.dtype:
    """float64, but on devices that do not know it."""
    return torch.float32 if device.type == "mps" else torch.float64


def unread(scaler: object) -> list[tuple[dict[torch.device, Tensor], torch.device]]:
    """Where a scaler that has unscaled gradients keeps, on a device, whether it met infinite ones. It reads that in `step`."""
    states = getattr(scaler, "_per_optimizer_states", {}).values()
    findings = [state["found_inf_per_device"] for state in states]
    return [(found, place) for found in findings for place in found if found[place].device.type != "cpu"]


def loss_factor(scaler: torch.amp.GradScaler | None, device: torch.device) -> float | Tensor:
    """What a GradScaler multiplies a loss by: a number on the device, which nobody reads."""
    return 1.0 if scaler is None else scaler.scale(torch.ones((), device=device))


@torch.no_grad()
def overflow(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Whether some number in the gradients of this rank is not finite, as 1 or 0 on the device."""
    largest = _term([to_local(grad) for grad in gradients], math.inf, device)
    return largest.isfinite().logical_not().to(largest.dtype).reshape(1)


@torch.no_grad()
def spoil_if(flag: Tensor, gradients: Sequence[Tensor]) -> None:
    """Make a gradient infinite if the flag on the device is more than 0: a GradScaler then skips the step here too."""
    if gradients:
        first = to_local(gradients[0])
        first.add_(torch.where(flag > 0, math.inf, 0.0).to(first.device, first.dtype))


@torch.no_grad()
def shrink(gradients: Iterable[Tensor], factor: float) -> None:
    """Multiply in place by the factor, if it is below 1."""
    local = [to_local(grad) for grad in gradients]
    if local and factor < 1.0:
        torch._foreach_mul_(local, factor)
