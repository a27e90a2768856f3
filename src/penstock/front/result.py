"""What a step gives: its loss, which on a device is read when somebody asks for it; and how all ranks come to know it.

In host memory the losses, and whether gradients overflowed, are told as soon as they are there. On accelerators they are numbers
on a device when the host has issued the step, and to send them over host memory some host would have to wait for its device. So
they go from device to device, over the communicators that neighbours have anyway: up a tree of ranks to that of the last stage,
and down again. All ranks issue these messages after the last message of the step, in the order of the tree, so they cannot hold
up one another whatever the queues are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from penstock.front.ends import Ends
from penstock.front.norm import precise_on
from penstock.front.weighted import WeightedSchedule
from penstock.nest import Value
from penstock.plan import Placement

Numbers = tuple[float | None, tuple[float, ...]]
Told = tuple[Callable[[], Numbers], Tensor | None]
"""What all ranks know after a step. What reads the loss of the batch and of each microbatch: on a device the host waits for them
then. And whether gradients overflowed on any rank, as a number more than 0; None: nobody asked."""


class Result:
    """What a step gives on every rank.

        print(pipe.step(tokens, target=labels).loss)

    On an accelerator a step returns before its kernels have run, and the loss is a number there. The first look at `loss` or
    `losses` makes the host wait for it; whoever does not look does not wait. No other rank need look too.
    """

    outputs: Value  # of the model, on the ranks that asked for them

    def __init__(self, read: Callable[[], Numbers], outputs: Value = None) -> None:
        self._read = read
        self.outputs = outputs

    @cached_property
    def _numbers(self) -> Numbers:
        return self._read()

    @property
    def loss(self) -> float | None:
        """The loss of the whole batch; None where it was not shared."""
        return self._numbers[0]

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss of each microbatch."""
        return self._numbers[1]

    def __repr__(self) -> str:
        return f"Result(loss={self.loss}, losses={self.losses}, outputs={self.outputs!r})"


def telling(ends: Ends, placement: Placement) -> OnDevice | OnHost:
    """How the ranks of this pipeline tell one another: by where its tensors are."""
    alone = ends.transport.num_ranks == 1
    there = ends.device.type != "cpu" and (alone or ends.transport.device.type == ends.device.type)
    return OnDevice(ends, placement) if there else OnHost(ends, placement)


class OnHost:
    """The ranks of one pipeline, which read numbers as soon as they are there."""

    def __init__(self, ends: Ends, placement: Placement) -> None:
        self._ends, self._last = ends, placement.ranks[-1]

    def tell(
        self, schedule: WeightedSchedule, losses: Sequence[Tensor], *, shares: bool, overflow: Tensor | None
    ) -> Told:
        """After a step that succeeded: all ranks of all replicas call it."""
        if overflow is not None:
            overflow = torch.tensor([float(self._ends.any(bool(overflow)))])
        numbers = [float(loss) for loss in losses]
        total = schedule.total(numbers) if numbers else None
        if shares:
            known = bool(losses) or self._ends.rank != self._last  # else it was an evaluation without a target
            total, *numbers = share_losses(self._ends, total, numbers, count=schedule.num_microbatches, last=self._last)
            if not known:
                total, numbers = None, []
        found: Numbers = total, tuple(numbers)
        return lambda: found, overflow


def share_losses(ends: Ends, total: float | None, losses: Sequence[float], *, count: int, last: int) -> list[float]:
    """The loss of the batch and of each microbatch, from the last stage's rank, on every rank."""
    shared = torch.full((count + 1,), float("nan"), dtype=torch.float64, device=ends.transport.device)
    if total is not None:
        shared.copy_(torch.tensor([total, *losses], dtype=torch.float64))
    with ends.among_replicas():
        if ends.transport.num_ranks > 1:
            ends.transport.broadcast(shared, last)
        ends.mean_over_replicas(shared[:1])
    return [float(value) for value in shared]


class OnDevice:
    """The tree of the ranks of one pipeline."""

    def __init__(self, ends: Ends, placement: Placement) -> None:
        self._ends, self._transport = ends, ends.transport
        parents = tree(placement)
        self._parent = parents[ends.rank]
        self._children = [rank for rank, parent in parents.items() if parent == ends.rank]
        self._dtype = precise_on(ends.device)

    @torch.no_grad()
    def tell(
        self, schedule: WeightedSchedule, losses: Sequence[Tensor], *, shares: bool, overflow: Tensor | None
    ) -> Told:
        """After a step that succeeded: all ranks of all replicas call it. The host does not wait."""
        mine = None
        if losses:
            each = torch.stack([loss.detach().to(self._ends.device, self._dtype).reshape(()) for loss in losses])
            mine = torch.cat([schedule.total(each).reshape(1), each])
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
        """If `losses` is None, they are not known on this rank; else the loss of the batch, then those of the microbatches."""

        def read() -> Numbers:
            total, *each = (None,) if losses is None else self._transport.read(losses)
            return total, tuple(each)

        return read, overflow

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


def tree(placement: Placement) -> dict[int, int | None]:
    """The parent of each rank, over ranks whose stages are neighbours; that of the last stage is the root.

    >>> tree(Placement.loop(4))
    {3: None, 2: 3, 1: 2, 0: 1}
    >>> tree(Placement.v(3))
    {0: None, 1: 0, 2: 1}
    """
    root = placement.ranks[-1]
    beside: dict[int, set[int]] = {rank: set() for rank in placement.ranks}
    for one, other in pairwise(placement.ranks):
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
