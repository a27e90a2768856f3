"""What a step gives, and how it comes to the ranks: losses, which on a device are read when somebody asks for them, and outputs.

In host memory the losses, and whether gradients overflowed, are told as soon as they are there. On accelerators they are numbers
on a device when the host has issued the step, and to send them over host memory some host would have to wait for its device. So
they go from device to device, over the communicators that neighbours have anyway: up a tree of ranks to that of the last stage,
and down again. All ranks issue these messages after the last message of the step, in the order of the tree, so they cannot hold
up one another whatever the queues are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from penstock.batch.batch import Batch, precise_on
from penstock.batch.policy import total
from penstock.comm.framing import complete, frame, receive_frame
from penstock.comm.transport import Transport
from penstock.dtypes import dtype_name, dtype_named
from penstock.errors import RunError
from penstock.front.mesh import PipelineMesh
from penstock.nest import Value
from penstock.plan import Placement
from penstock.run.layout import wire
from penstock.run.runner import Outcome
from penstock.stage.boundary import Spec, flatten, unflatten

Where = Literal["all", "last"] | int | None  # on which ranks the outputs are wanted
Numbers = tuple[float | None, tuple[float, ...]]
Told = tuple[Callable[[], Numbers], Tensor | None, Tensor | None]
"""What all ranks know after a step. What reads the loss of the batch and of each microbatch: on a device the host waits for them
then. The loss of the batch as a tensor; None where it is not known. And whether gradients overflowed on any rank, as a number
more than 0; None: nobody asked."""


class Result:
    """What a step gives on every rank.

        print(pipe.step(tokens, target=labels).loss)

    On an accelerator a step returns before its kernels have run, and the loss is a number there. The first look at `loss` or
    `losses` makes the host wait for it; whoever does not look does not wait. No other rank need look too.
    """

    outputs: Value  # of the model, on the ranks that asked for them

    loss_tensor: Tensor | None  # the loss of the whole batch, of no dimension, on the device; no host waits for it

    def __init__(self, read: Callable[[], Numbers], outputs: Value = None, loss_tensor: Tensor | None = None) -> None:
        self._read = read
        self.outputs, self.loss_tensor = outputs, loss_tensor

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


class Telling:
    """How the ranks of one pipeline come to know the numbers of a step: in host memory, or from device to device over a tree."""

    def __init__(self, ends: PipelineMesh, placement: Placement) -> None:
        self._ends, self._transport, self._last = ends, ends.transport, placement.ranks[-1]
        alone = ends.transport.num_ranks == 1
        self._stays = ends.device.type != "cpu" and (alone or ends.transport.device.type == ends.device.type)
        self._device = ends.device if self._stays else torch.device("cpu")
        self._dtype = precise_on(self._device)
        parents = tree(placement)
        self._parent = parents[ends.rank]
        self._children = [rank for rank, parent in parents.items() if parent == ends.rank]

    @torch.no_grad()
    def tell(self, outcome: Outcome, batch: Batch, *, shares: bool, overflow: Tensor | None) -> Told:
        """After a step that succeeded: all ranks of all replicas call it. On a device the host does not wait."""
        mine, losses = self._loss_of_all(outcome, batch.count), outcome.losses
        tell = self._from_device_to_device if self._stays else self._in_host_memory
        told, overflow = tell(mine if shares else mine[:0], overflow)
        # The last stage's rank has none after an evaluation without a target.
        is_known = bool(losses) or (shares and self._ends.rank != self._last)

        def read() -> Numbers:
            total, *numbers = self._transport.read(told if shares else mine) if is_known else (None,)
            return total, tuple(numbers)

        loss = None
        if is_known:  # a copy: what was told may be on its way to other ranks
            loss = (told if shares else mine)[0].to(self._ends.device, copy=True)
        return read, loss, overflow

    def _loss_of_all(self, outcome: Outcome, count: int) -> Tensor:
        """The loss of the batch, then those of the microbatches; where this rank knows of none, no numbers."""
        losses, shares = outcome.losses, outcome.shares
        if not losses:
            return torch.full((count + 1,), math.nan, dtype=self._dtype, device=self._device)
        if self._stays:
            each = torch.stack([loss.detach().to(self._device, self._dtype).reshape(()) for loss in losses])
            return torch.cat([total(each, shares).reshape(1), each])
        numbers = [float(loss) for loss in losses]
        return torch.tensor([float(total(numbers, shares)), *numbers], dtype=self._dtype)

    def _in_host_memory(self, losses: Tensor, overflow: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if overflow is not None:
            overflow = torch.tensor([float(self._ends.ranks.any(bool(overflow)))])
        if losses.numel():
            with self._ends.among_replicas():
                if self._transport.num_ranks > 1:
                    self._transport.broadcast(losses, self._last)
                self._ends.mean_over_replicas(losses[:1])
        return losses, overflow

    def _from_device_to_device(self, losses: Tensor, overflow: Tensor | None) -> tuple[Tensor, Tensor | None]:
        count = losses.numel()
        if overflow is not None:
            overflow = self._up(overflow.to(self._dtype).reshape(1))
        if count and self._parent is None:  # before it is sent: what is on its way must not be changed
            self._ends.mean_over_replicas(losses[:1])
        told = losses if overflow is None else torch.cat([losses, overflow])
        if told.numel():
            told = self._down(told)
        return told[:count], None if overflow is None else told[count:]

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
    """The parent of each rank: that of the next stage after its last one. The rank of the last stage is the root.

    >>> tree(Placement.loop(4))
    {3: None, 2: 3, 1: 2, 0: 1}
    >>> tree(Placement.v(3))
    {0: None, 1: 0, 2: 1}
    """
    parents: dict[int, int | None] = {placement.ranks[-1]: None}
    for rank, after in reversed(list(pairwise(placement.ranks))):
        parents.setdefault(rank, after)
    return parents


def send_to(transport: Transport, ranks: Sequence[int], value: object) -> None:
    """Send a tree of tensors to these ranks."""
    tensors, spec = flatten(value)
    local = [wire(tensor.detach()) for tensor in tensors]
    rows = [[list(tensor.shape), dtype_name(tensor.dtype)] for tensor in local]
    described = frame(0, json.dumps([rows, spec.to_json()]).encode())
    works = [transport.control.isend(part, rank) for rank in ranks for part in described]
    works += [transport.isend(tensor, rank) for rank in ranks for tensor in local]
    for work in works:
        work.wait()


def receive_from(transport: Transport, rank: int) -> Value:
    """Receive what `send_to` sends."""
    _, description = complete(receive_frame(lambda parts: transport.control.irecv(parts[0], rank)))
    rows, spec = json.loads(description)
    buffers = [torch.empty(shape, dtype=dtype_named(dtype), device=transport.device) for shape, dtype in rows]
    for buffer in buffers:
        transport.irecv(buffer, rank).wait()
    return unflatten(Spec.from_json(spec), buffers)


def gather_on_first(transport: Transport, value: object) -> list[Value]:
    """The trees of tensors of all ranks, on the first one; on the others nothing."""
    if transport.rank > 0:
        send_to(transport, [0], value)
        return []
    return [value, *(receive_from(transport, rank) for rank in range(1, transport.num_ranks))]


def deliver(ends: PipelineMesh, value: object, outputs: Where, *, last: int) -> Value:
    """The outputs on the ranks that want them."""
    if outputs is None or outputs == "last":
        return value
    wanted = range(ends.num_ranks) if outputs == "all" else (int(outputs),)
    others = [other for other in wanted if other != last]
    with ends.among_replicas():  # who must hear of it if this pipeline cannot go on
        if ends.rank == last:
            send_to(ends.transport, others, value)
            return value if last in wanted else None
        return receive_from(ends.transport, last) if ends.rank in others else None


def check_where(outputs: object, num_ranks: int) -> None:
    """Before anything runs: whether there is such a place."""
    if outputs in (None, "all", "last") or (type(outputs) is int and 0 <= outputs < num_ranks):
        return
    raise RunError(f'outputs={outputs!r}; expected "all", "last", a rank from 0 to {num_ranks - 1}, or nothing')
