"""What the ranks of a pipeline on accelerators tell one another after a step, from device to device.

The losses, and whether gradients overflowed, are numbers on a device when the host has issued the step. To send them over host
memory some host would have to wait for its device. So they go from device to device, over the communicators that neighbours
have anyway: up a tree of ranks to that of the last stage, and down again. All ranks issue these messages after the last
message of the step, in the order of the tree, so they cannot hold up one another whatever the queues are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from penstock.comm.transport import Transport
from penstock.front.ends import Ends
from penstock.front.norm import precise_on
from penstock.front.result import Numbers, Told
from penstock.front.weighted import WeightedSchedule
from penstock.plan import Placement


class OnDevice:
    """The tree of the ranks of one pipeline. `OnDevice.of` gives None where tensors are in host memory."""

    def __init__(self, ends: Ends, placement: Placement) -> None:
        self._ends, self._transport = ends, ends.transport
        parents = tree(placement)
        self._parent = parents[ends.rank]
        self._children = [rank for rank, parent in parents.items() if parent == ends.rank]
        self._dtype = precise_on(ends.device)

    @classmethod
    def of(cls, ends: Ends, placement: Placement) -> OnDevice | None:
        alone = ends.transport.num_ranks == 1
        there = ends.device.type != "cpu" and (alone or ends.transport.device.type == ends.device.type)
        return cls(ends, placement) if there else None

    @torch.no_grad()
    def tell(
        self, schedule: WeightedSchedule, losses: Sequence[Tensor], *, shares: bool, overflow: Tensor | None
    ) -> Told:
        """After a step that succeeded: all ranks of all replicas call it. The host does not wait."""
        mine = self._stacked(schedule, losses)
        size = schedule.num_microbatches + 1 if shares else 0
        if overflow is not None:
            overflow = self._up(overflow.to(self._dtype).reshape(1))
        if not size and overflow is None:
            return self._told(mine, None)
        nothing = torch.full((size,), float("nan"), dtype=self._dtype, device=self._ends.device)
        shared = nothing if mine is None or not size else mine
        if size and self._parent is None:  # before it is sent: what is on its way must not be changed
            self._ends.mean_over_replicas(shared[:1])
        told = self._down(shared if overflow is None else torch.cat([shared, overflow]))
        if not size:
            return self._told(mine, told)
        known = mine is not None or self._parent is not None  # else it was an evaluation without a target
        return self._told(told[:size] if known else None, None if overflow is None else told[size:])

    def _told(self, losses: Tensor | None, overflow: Tensor | None) -> Told:
        return Told(partial(_read, self._transport, losses), overflow)

    def _stacked(self, schedule: WeightedSchedule, losses: Sequence[Tensor]) -> Tensor | None:
        if not losses:
            return None
        each = torch.stack([loss.detach().to(self._ends.device, self._dtype).reshape(()) for loss in losses])
        return torch.cat([schedule.total(each).reshape(1), each])

    def _up(self, value: Tensor) -> Tensor:
        """The sum over this rank and those beneath it, over all replicas."""
        self._ends.mean_over_replicas(value)
        for child in self._children:
            part = torch.empty_like(value)
            self._transport.irecv(part, child).wait()
            value = value + part
        if self._parent is not None:
            self._transport.isend(value, self._parent)  # nobody changes it, and nobody waits until it is taken
        return value

    def _down(self, value: Tensor) -> Tensor:
        """What the root of the tree has."""
        if self._parent is not None:
            value = torch.empty_like(value)
            self._transport.irecv(value, self._parent).wait()
        for child in self._children:
            self._transport.isend(value, child)
        return value


def _read(transport: Transport, losses: Tensor | None) -> Numbers:
    """The loss of the batch, then those of the microbatches. If `losses` is None, they are not known on this rank."""
    if losses is None:
        return None, ()
    total, *each = transport.read(losses)
    return total, tuple(each)


def tree(placement: Placement) -> dict[int, int | None]:
    """The parent of each rank, over ranks whose stages are neighbours; that of the last stage is the root.

    >>> tree(Placement.loop(4))
    {3: None, 2: 3, 1: 2, 0: 1}
    >>> tree(Placement.v(3))
    {0: None, 1: 0, 2: 1}
    """
    root = placement.ranks[-1]
    beside: dict[int, set[int]] = {rank: set() for rank in placement.ranks}
    for one, other in zip(placement.ranks, placement.ranks[1:], strict=False):
        beside[one].add(other)
        beside[other].add(one)
    parents: dict[int, int | None] = {root: None}
    found = deque([root])
    while found:
        rank = found.popleft()
        for other in sorted(beside[rank] - parents.keys()):
            parents[other] = rank
            found.append(other)
    return parents
