"""Boxes: where the values of microbatches in flight lie, between the action that makes them and the one that takes them.

An `Inbox` holds what a producer stage gave to this rank, as fresh leaves: autograd gathers their gradients in `.grad`,
over all the stages of this rank that use them. An `Outbox` holds what a stage of this rank gave to one rank (perhaps
this one), with its graph, until its gradient comes back.

Each message has a cold form, which describes itself, and a warm form, which relies on the layout that the cold step left.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.comm.framing import Receiving
from penstock.comm.messages import Work
from penstock.errors import ShapeError
from penstock.run.channel import Channel
from penstock.run.layout import Description, GradLayout, Layout, TensorLayout, unwire, wire
from penstock.stage.boundary import SINGLE, flatten, unflatten


class Inbox:
    """What the stage `producer` gave to this rank, by microbatch."""

    def __init__(
        self, producer: int, num_microbatches: int, *, channel: Channel | None, grad: bool, readers: int, mesh: Any
    ) -> None:
        self.producer = producer
        self.channel = channel  # None: the producer sits on this rank
        self.grad = grad  # whether gradients go back
        self.readers = readers  # how many stages of this rank use it
        self.mesh = mesh  # a function of a layout: what an arriving DTensor is put on
        self.places: tuple[int, ...] = ()  # which outputs of the producer these are, for a captured stage
        self.leaves: list[list[Tensor] | None] = [None] * num_microbatches
        self.values: list[Any] = [None] * num_microbatches
        self.works: list[list[Work] | None] = [None] * num_microbatches
        self.reads = [0] * num_microbatches
        self.layouts: list[Layout | None] = [None] * num_microbatches
        self.grad_layouts: list[GradLayout | None] = [None] * num_microbatches

    # -- forward

    def put(self, microbatch: int, tensors: list[Tensor], spec: Any) -> None:
        """Hand over on one rank: fresh leaves of the same memory."""
        leaves = [t.detach().requires_grad_(self.grad and t.requires_grad) for t in tensors]
        self.leaves[microbatch] = leaves
        self.values[microbatch] = unflatten(spec, leaves)

    def post(self, microbatch: int) -> None:
        """RECV_F of a warm step."""
        layout, channel = self.layouts[microbatch], self.channel
        buffers, works = [], []
        try:
            for tensor in layout.tensors:  # type: ignore[union-attr]
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device=channel.device)  # type: ignore[union-attr]
                buffers.append(buffer)
                works.append(channel.recv([buffer]))  # type: ignore[union-attr]
        except RuntimeError as error:
            channel.fail(error)  # type: ignore[union-attr]
        self.leaves[microbatch] = buffers
        self.works[microbatch] = works

    def queue(self, microbatch: int) -> None:
        """RECV_F of a cold step: its turn comes when somebody needs it, or something behind it."""
        self.channel.incoming.append(self.pull(microbatch))  # type: ignore[union-attr]

    def pull(self, microbatch: int) -> Receiving[None]:
        """Receive a message of a cold step."""
        channel = self.channel
        assert channel is not None, "only another rank sends messages"
        description = Description.decode((yield from channel.receive_description()))
        self.leaves[microbatch] = yield from channel.receive([t.empty(channel.device) for t in description.tensors])
        layout = self.layouts[microbatch] = description.layout()
        self._arrive(microbatch, layout)

    def ready(self, microbatch: int) -> Any:
        """The value, as soon as it is there."""
        works = self.works[microbatch]
        if works is not None:
            wait = self.channel.wait  # type: ignore[union-attr]
            try:
                while works:  # taken out before it is waited for: a wait that Ctrl-C breaks off is over all the same
                    wait(works.pop())
            except RuntimeError as error:
                self.channel.fail(error)  # type: ignore[union-attr]
            self.works[microbatch] = None
            self._arrive(microbatch, self.layouts[microbatch])  # type: ignore[arg-type]
        elif self.leaves[microbatch] is None and self.channel is not None:
            self.channel.pull_until(lambda: self.leaves[microbatch] is not None)
        return self.values[microbatch]

    def _arrive(self, microbatch: int, layout: Layout) -> None:
        """Make leaves of the buffers."""
        leaves: Any = self.leaves[microbatch]
        for place, description in enumerate(layout.tensors):
            if description.distributed is not None:
                leaves[place] = unwire(leaves[place], description, self.mesh(description.distributed))
            if description.requires_grad and self.grad:
                leaves[place].requires_grad_()
        self.values[microbatch] = leaves[0] if layout.spec is SINGLE else unflatten(layout.spec, leaves)

    def read(self, microbatch: int) -> None:
        """In a forward-only plan: let go when the last stage of this rank has read it."""
        self.reads[microbatch] += 1
        if self.reads[microbatch] == self.readers:
            self.reads[microbatch] = 0
            self.leaves[microbatch] = self.values[microbatch] = None

    # -- backward

    def grads(self, microbatch: int) -> list[Tensor | None]:
        """The gradients of the leaves, which are let go."""
        leaves = self.leaves[microbatch]
        found = [leaf.grad for leaf in leaves]  # type: ignore[union-attr]
        self.leaves[microbatch] = self.values[microbatch] = None
        return found

    def send_grads(self, microbatch: int) -> None:
        """SEND_B of a warm step. Nothing is sent before all of it has been found to be as expected."""
        layout, leaves = self.grad_layouts[microbatch], self.leaves[microbatch]
        self.leaves[microbatch] = self.values[microbatch] = None
        grads = []
        for place, (leaf, expected) in enumerate(zip(leaves, layout.tensors, strict=True)):  # type: ignore[arg-type,union-attr]
            grad = leaf.grad
            if expected is not None:
                if grad is None:
                    grad = torch.zeros(expected.shape, dtype=expected.dtype, device=leaf.device)
                elif grad.dtype is not leaf.dtype or grad.shape != leaf.shape:
                    raise self._changed(microbatch, place, leaf, f"{_name(grad)}")
                elif expected.distributed is not None and not expected.matches(grad):
                    raise self._changed(microbatch, place, leaf, f"{_name(grad)} spread in another way")
                grads.append(wire(grad))
            elif grad is not None:
                raise self._changed(
                    microbatch, place, leaf, "none in the first step with inputs of these shapes, and one now"
                )
        for grad in grads:
            self.channel.post(grad)  # type: ignore[union-attr]

    def _changed(self, microbatch: int, place: int, leaf: Tensor, what: str) -> ShapeError:
        return ShapeError(
            f"microbatch {microbatch}: the gradient of tensor {place} of stage {self.producer}'s output ({_name(leaf)}) is "
            f"{what}; expected what the first step had. A hook that returns another type or shape must be mended; a model "
            "whose graph changes from step to step needs a schedule made with dynamic=True"
        )

    def send_described_grads(self, microbatch: int) -> None:
        """SEND_B of a cold step. There is a message even without a gradient, so that both ends always count alike."""
        channel = self.channel
        assert channel is not None, "only another rank is sent gradients"
        leaves = self.leaves[microbatch] or []
        grads = self.grads(microbatch)
        for place, (leaf, grad) in enumerate(zip(leaves, grads, strict=True)):
            if grad is not None and (grad.dtype is not leaf.dtype or grad.shape != leaf.shape):
                raise self._changed(microbatch, place, leaf, _name(grad))
        description = GradLayout(tuple(None if grad is None else TensorLayout.of(grad) for grad in grads))
        self.grad_layouts[microbatch] = description
        channel.post_described(description.encode(), [wire(grad) for grad in grads if grad is not None])

    # -- failure

    def drain_receive(self, microbatch: int, *, cold: bool) -> None:
        self.queue(microbatch) if cold else self.post(microbatch)

    def drain_send(self, microbatch: int, *, cold: bool) -> None:
        """SEND_B of a step that has failed."""
        channel, layout = self.channel, self.layouts[microbatch]
        assert channel is not None, "only messages are drained"
        if cold:
            channel.post_poison()
            return
        grads = self.grad_layouts[microbatch]
        for tensor in grads.tensors if layout and grads else ():
            if tensor is not None:
                channel.post(torch.zeros(tensor.shape, dtype=tensor.dtype, device=channel.device))

    def left_over(self) -> list[int]:
        return [m for m, leaves in enumerate(self.leaves) if leaves is not None or self.works[m] is not None]

    def pending(self) -> list[Work]:
        return [work for works in self.works if works is not None for work in works]

    def clear(self) -> None:
        size = len(self.leaves)
        self.leaves[:] = [None] * size
        self.values[:] = [None] * size
        self.works[:] = [None] * size
        self.reads[:] = [0] * size


class Outbox:
    """What a stage of this rank gave to one rank, by microbatch."""

    def __init__(
        self,
        stage: int,
        num_microbatches: int,
        *,
        channel: Channel | None,
        grad: bool,
        select: tuple[int, ...] | None,
        inbox: Inbox | None,
    ) -> None:
        self.stage = stage
        self.channel = channel  # None: the consumer sits on this rank, and `inbox` is where it looks
        self.inbox = inbox
        self.grad = grad
        self.select = select  # which outputs of the stage; None: the output as it is
        self.repeated: frozenset[int] = (
            frozenset()
        )  # microbatches whose forward is run again: until then nothing is kept
        self.tensors: list[list[Tensor] | None] = [None] * num_microbatches
        self.specs: list[Any] = [None] * num_microbatches
        self.buffers: list[list[Tensor | None] | None] = [None] * num_microbatches  # gradients, arriving or there
        self.works: list[list[Work] | None] = [None] * num_microbatches
        self.layouts: list[Layout | None] = [None] * num_microbatches
        self.grad_layouts: list[GradLayout | None] = [None] * num_microbatches

    # -- forward

    def keep(self, microbatch: int, output: Any) -> None:
        """After the forward: what goes there, and its nest."""
        select = self.select
        if select is not None and type(output) is tuple:  # one value goes as it is, and needs no nest
            output = output[select[0]] if len(select) == 1 else tuple([output[place] for place in select])
        tensors, spec = flatten(output)
        if self.inbox is not None:
            self.inbox.put(microbatch, tensors, spec)
            if not self.grad or microbatch in self.repeated:
                return
        self.tensors[microbatch] = tensors
        self.specs[microbatch] = spec

    def keep_again(self, microbatch: int, output: Any) -> None:
        """After a forward that was run again: the same with its graph, from which the backward starts."""
        if self.select is not None:
            output = tuple(output[place] for place in self.select)
        self.tensors[microbatch], self.specs[microbatch] = flatten(output)

    def _sent(self, microbatch: int) -> None:
        """A value that went out stays for its gradient, unless there will be none, or another is made for it."""
        if not self.grad or (
            microbatch in self.repeated and all(tensor.grad_fn is None for tensor in self.tensors[microbatch] or ())
        ):
            self.tensors[microbatch] = self.specs[microbatch] = None

    def send(self, microbatch: int) -> None:
        """SEND_F of a warm step."""
        tensors, layout = self.tensors[microbatch], self.layouts[microbatch]
        layout.check(tensors, self.specs[microbatch], self.stage, microbatch)  # type: ignore[union-attr,arg-type]
        post = self.channel.post  # type: ignore[union-attr]
        for tensor in tensors:  # type: ignore[union-attr]
            post(wire(tensor))
        self._sent(microbatch)

    def send_described(self, microbatch: int) -> None:
        """SEND_F of a cold step."""
        tensors = self.tensors[microbatch]
        assert tensors is not None, "a value is sent after its forward"
        assert self.channel is not None, "only another rank is sent messages"
        layout = Layout(tuple(map(TensorLayout.of, tensors)), self.specs[microbatch])
        layout.check_device(self.channel.device, self.stage, microbatch)
        self.layouts[microbatch] = layout
        self.channel.post_described(layout.encode(), list(map(wire, tensors)))
        self._sent(microbatch)

    # -- backward

    def post_grads(self, microbatch: int) -> None:
        """RECV_B of a warm step."""
        grads, channel = self.grad_layouts[microbatch], self.channel
        buffers: list[Tensor | None] = []
        works = []
        try:
            for tensor in grads.tensors:  # type: ignore[union-attr]
                if tensor is not None:
                    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device=channel.device)  # type: ignore[union-attr]
                    buffers.append(buffer)
                    works.append(channel.recv([buffer]))  # type: ignore[union-attr]
                else:
                    buffers.append(None)
        except RuntimeError as error:
            channel.fail(error)  # type: ignore[union-attr]
        self.buffers[microbatch] = buffers
        self.works[microbatch] = works

    def queue_grads(self, microbatch: int) -> None:
        """RECV_B of a cold step."""
        self.channel.incoming.append(self.pull_grads(microbatch))  # type: ignore[union-attr]

    def pull_grads(self, microbatch: int) -> Receiving[None]:
        channel = self.channel
        assert channel is not None, "only another rank sends gradients"
        grads = GradLayout.decode((yield from channel.receive_description()))
        assert self.layouts[microbatch] is not None, (
            "a gradient comes after its value was sent; after poison comes poison"
        )
        self.grad_layouts[microbatch] = grads
        buffers = [None if tensor is None else tensor.empty(channel.device) for tensor in grads.tensors]
        self.buffers[microbatch] = yield from channel.receive(buffers)

    def gradients(self, microbatch: int) -> list[Tensor | None]:
        """The gradients of `tensors`, as soon as they are there."""
        if self.inbox is not None:
            return self.inbox.grads(microbatch)
        works = self.works[microbatch]
        if works is not None:
            wait = self.channel.wait  # type: ignore[union-attr]
            try:
                while works:  # taken out before it is waited for: a wait that Ctrl-C breaks off is over all the same
                    wait(works.pop())
            except RuntimeError as error:
                self.channel.fail(error)  # type: ignore[union-attr]
            self.works[microbatch] = None
        elif self.buffers[microbatch] is None and self.channel is not None:
            self.channel.pull_until(lambda: self.buffers[microbatch] is not None)
        buffers, self.buffers[microbatch] = self.buffers[microbatch], None
        layout = self.grad_layouts[microbatch]
        if layout is not None and layout.distributed:
            buffers = [
                grad if grad is None or t is None else unwire(grad, t, getattr(tensor, "device_mesh", None))
                for tensor, grad, t in zip(self.tensors[microbatch], buffers, layout.tensors, strict=True)  # type: ignore[arg-type]
            ]
        return buffers  # type: ignore[return-value]

    # -- failure

    def drain_receive(self, microbatch: int, *, cold: bool) -> None:
        self.queue_grads(microbatch) if cold else self.post_grads(microbatch)

    def drain_send(self, microbatch: int, *, cold: bool) -> None:
        """SEND_F of a step that has failed."""
        channel, layout = self.channel, self.layouts[microbatch]
        assert channel is not None, "only messages are drained"
        if cold:
            self.layouts[microbatch] = None
            channel.post_poison()
            return
        for tensor in layout.tensors if layout else ():
            channel.post(torch.zeros(tensor.shape, dtype=tensor.dtype, device=channel.device))

    def left_over(self) -> list[int]:
        return [
            m
            for m, tensors in enumerate(self.tensors)
            if tensors is not None or self.buffers[m] is not None or self.works[m] is not None
        ]

    def pending(self) -> list[Work]:
        return [work for works in self.works if works is not None for work in works]

    def clear(self) -> None:
        size = len(self.tensors)
        self.tensors[:] = [None] * size
        self.specs[:] = [None] * size
        self.buffers[:] = [None] * size
        self.works[:] = [None] * size


def _name(tensor: Tensor) -> str:
    return str(TensorLayout.of(tensor))
