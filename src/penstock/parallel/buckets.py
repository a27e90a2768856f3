"""The mean of gradients over a process group, in flat buckets.

Each bucket carries, behind its gradients, one number for each parameter that says whether this replica has a gradient
for it. So a parameter that only some replicas used is averaged over all of them, one that none used keeps
`.grad` as it is, and agreeing on it costs no message of its own. One more number for each replica says whether it has failed.

On an accelerator the host would have to wait for the device to read these numbers. There the hosts of the replicas tell one
another first, and the buckets carry gradients alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.comm.host_group import host_group

IN_FLIGHT = 2
"""Buckets on their way at a time: while one travels, the next is filled or emptied."""


@torch.no_grad()
def average_gradients(
    parameters: Sequence[Tensor], group: dist.ProcessGroup, *, bucket_bytes: int, failed: bool = False
) -> list[int]:
    """Make every `.grad` its mean over `group`, in place. All replicas pass the same parameters in the same order.

    The replicas that have failed come back, by their ranks in the group; gradients are then as they were.
    """
    if group.size() == 1:
        return [0] if failed else []
    told = all(local(p).device.type != "cpu" for p in parameters) and bool(parameters)
    failures = agree_in_host_memory(parameters, group, failed=failed) if told else []
    flight: deque[Callable[[], list[int]]] = deque()
    for members in () if failures else _by_size(parameters, bucket_bytes):
        flight.append(_send(members, group, None if told else failed))
        if len(flight) > IN_FLIGHT:
            failures = flight.popleft()() or failures
    return next(filter(None, [finish() for finish in flight]), failures)


def agree_in_host_memory(parameters: Sequence[Tensor], group: dist.ProcessGroup, *, failed: bool) -> list[int]:
    """The replicas that have failed. If none has, a parameter that another one has a gradient for has one here from now on."""
    known = torch.tensor(_facts(parameters, group, failed), dtype=torch.int32)
    host_group(group).sum(known)
    return _failures(parameters, known)


def _facts(parameters: Sequence[Tensor], group: dist.ProcessGroup, failed: bool) -> list[float]:
    """Whether there is a gradient, for each parameter; and for each replica, in its own place, whether it has failed."""
    flags = [failed and rank == group.rank() for rank in range(group.size())]
    return list(map(float, [*(parameter.grad is not None for parameter in parameters), *flags]))


def _failures(parameters: Sequence[Tensor], known: Tensor) -> list[int]:
    """What the sum of `_facts` over the replicas says."""
    numbers = known.tolist()
    failures = [rank for rank, flag in enumerate(numbers[len(parameters) :]) if flag]
    for count, parameter in zip(numbers, () if failures else parameters, strict=False):
        if count and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return failures


@torch.no_grad()
def average_sparse_gradients(parameters: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """The same for parameters whose gradients are sparse tensors, one message each."""
    size = dist.get_world_size(group)
    for parameter in parameters:
        grad = parameter.grad
        mean = torch.zeros_like(parameter, layout=torch.sparse_coo) if grad is None else grad / size
        mean = (
            mean if mean.is_sparse else mean.to_sparse(1)
        ).coalesce()  # a tied one is dense once its parts were added up
        dist.all_reduce(mean, group=group)
        if grad is not None or mean._nnz():
            parameter.grad = mean


def _by_size(parameters: Sequence[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Groups of one dtype and device, of about `limit` bytes each; the last parameters first, as backwards go."""
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    for parameter in reversed(parameters):
        key = parameter.dtype, parameter.device
        members, held = open_groups.pop(key, ([], 0))
        members.append(parameter)
        held += parameter.nbytes
        if held >= limit:
            yield members
        else:
            open_groups[key] = members, held
    for members, _ in open_groups.values():
        yield members


def _send(members: list[Tensor], group: dist.ProcessGroup, failed: bool | None) -> Callable[[], list[int]]:
    """Send gradients; what comes back waits for their mean and writes it back, unless a replica has failed.

    With `failed=None` the replicas have agreed before.
    """
    for parameter in members:
        if parameter.grad is not None and parameter.grad.is_sparse:  # in a captured stage nothing tells beforehand
            parameter.grad = parameter.grad.to_dense()
    first = local(members[0])
    facts = [] if failed is None else _facts(members, group, failed)
    parts = [local(p).new_zeros(local(p).numel()) if p.grad is None else local(p.grad).reshape(-1) for p in members]
    if facts:
        parts.append(first.new_tensor(facts))
    flat = torch.cat(parts).div_(group.size())  # before the sum, which might overflow
    work = dist.all_reduce(flat, group=group, async_op=True)

    def finish() -> list[int]:
        work.wait()
        *views, known = flat.split([*(local(p).numel() for p in members), len(facts)])
        failures = _failures(members, known) if facts else []
        for parameter, view in zip(members, views, strict=True):
            if parameter.grad is not None and not failures:
                target = local(parameter.grad)
                target.copy_(view.view(target.shape))
        return failures

    return finish


def local(tensor: Tensor) -> Tensor:
    """The part of a DTensor that lives here; any other tensor is here already."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
