"""Boxes: where the values of microbatches in flight lie, between the action that makes them and the one that takes them.

An `Inbox` holds what a producer stage gave to this rank, as fresh leaves: autograd gathers their gradients in `.grad`,
over all the stages of this rank that use them. An `Outbox` holds what a stage of this rank gave to one rank until it is
sent; then its gradient comes back.

Values go one way and their gradients the other. Where both ends know what a message looks like, its tensors are sent and nothing
else. Where they do not, in a cold step, it describes itself (see `penstock.run.layout`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from penstock.comm.framing import Receiving
from penstock.comm.messages import Work
from penstock.errors import ShapeError
from penstock.nest import Value
from penstock.run.channel import Channel
from penstock.run.layout import Layout, TensorLayout, dense, described, unwire, wire
from penstock.stage.boundary import SINGLE, Spec, unflatten
from penstock.stage.dtensors import DTensorLayout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MeshOf = Callable[[DTensorLayout], "DeviceMesh | None"]
"""What an arriving DTensor is put on."""
Layouts: TypeAlias = tuple[list[Layout | None], list[Layout | None]]  # of what comes and of what goes, by microbatch
Here = TypeVar("Here", Tensor, Tensor | None)  # what has arrived: leaves, or gradients where there are some


class MessageBox(Generic[Here]):
    """What an inbox and an outbox have in common: receiving, waiting, and getting out of the way of a failed step."""

    def __init__(self, num_microbatches: int, channel: Channel | None, *, grad: bool) -> None:
        self.channel: Channel = channel  # type: ignore[assignment]  # None: both stages sit here; only messages use it
        self.grad = grad  # whether gradients go back
        self.arrived: list[list[Here] | None] = [None] * num_microbatches  # what arrives here, or is here
        self.works: list[list[Work] | None] = [None] * num_microbatches  # while they are under way
        self.incoming, self.outgoing = self.unknown()  # what is known of what arrives, and of what is sent

    def unknown(self) -> Layouts:
        """What is known of messages in a cold step."""
        return [None] * len(self.works), [None] * len(self.works)

    def post(self, microbatch: int) -> None:
        """RECV. What describes itself is received when somebody needs it, or something behind it."""
        channel, layout = self.channel, self.incoming[microbatch]
        if layout is None:
            channel.queue(self.pull(microbatch))
            return
        buffers: list[Tensor | None] = [  # None: a value that has no gradient
            None
            if tensor is None
            else torch.empty(tensor.shape, dtype=tensor.dtype, device=channel.device)
            if tensor.order is None
            else tensor.empty(channel.device)
            for tensor in layout.tensors
        ]
        try:
            works = [
                channel.recv([buffer if tensor is None or tensor.order is None else buffer.permute(tensor.order)])
                for buffer, tensor in zip(buffers, layout.tensors, strict=True)
                if buffer is not None
            ]
        except RuntimeError as error:
            channel.fail(error)
        self.arrived[microbatch] = buffers  # type: ignore[assignment]  # as many, and of which kind, the layout says
        self.works[microbatch] = works

    def pull(self, microbatch: int) -> Receiving[None]:
        """Receive a message of a cold step, and what it says of itself."""
        channel = self.channel
        tensors, nest = described((yield from channel.receive_description()))
        buffers = [None if tensor is None else tensor.empty(channel.device) for tensor in tensors]
        for buffer, tensor in zip(buffers, tensors, strict=True):
            if buffer is not None and tensor is not None:
                yield channel.recv([buffer if tensor.order is None else buffer.permute(tensor.order)])
        self.arrived[microbatch] = buffers  # type: ignore[assignment]  # likewise
        self.incoming[microbatch] = Layout.decode(tensors, nest)

    def wait_for(self, microbatch: int) -> list[Here]:
        """What has arrived, as soon as it is there."""
        works = self.works[microbatch]
        if works is not None:
            wait = self.channel.wait
            self.channel.transport.awaited = self.channel.peer
            try:
                while works:  # taken out before it is waited for: a wait that Ctrl-C breaks off is over all the same
                    wait(works.pop())
            except RuntimeError as error:
                self.channel.fail(error)
            self.works[microbatch] = None
        elif self.channel is not None:
            while self.arrived[microbatch] is None:
                self.channel.pull()
        return self.arrived[microbatch] or []

    # -- failure

    drain_receive = post  # a message that a failed step does not need

    def drain_send(self, microbatch: int) -> None:
        """Send something in the place of a message that a failed step will not have."""
        layout, channel = self.outgoing[microbatch], self.channel
        if layout is None:
            channel.post_described(None)
            return
        for tensor in layout.tensors:
            if tensor is not None:
                channel.post(wire(tensor.zeros(channel.device), tensor.order))

    def left_over(self) -> list[int]:
        """The microbatches of which something is still here."""
        return [m for m, tensors in enumerate(self.arrived) if tensors is not None or self.works[m] is not None]

    def pending(self) -> list[Work]:
        """What was posted and not waited for."""
        return [work for works in self.works if works is not None for work in works]

    def clear(self) -> None:
        size = len(self.works)
        self.arrived[:] = [None] * size
        self.works[:] = [None] * size


class GradientAlone(NamedTuple):
    """What stays of a leaf whose value is no longer needed."""

    grad: Tensor | None
    is_leaf: bool = True


class Inbox(MessageBox[Tensor]):
    """What the stage `producer` gave to this rank, by microbatch: `arrived` are leaves."""

    def __init__(self, producer: int, num_microbatches: int, channel: Channel | None, *, grad: bool) -> None:
        super().__init__(num_microbatches, channel, grad=grad)
        self.producer = producer
        self.readers = 1  # how many stages of this rank use it
        self.mesh: MeshOf | None = None
        self.places: tuple[int, ...] = ()  # which outputs of the producer these are, for a captured stage
        self.values: list[Value] = [None] * num_microbatches
        self.reads = [0] * num_microbatches

    # -- forward

    def put(self, microbatch: int, tensors: Sequence[Tensor], spec: Spec) -> None:
        """Hand over on one rank: fresh leaves of the same memory."""
        leaves = [t.detach().requires_grad_(self.grad and t.requires_grad) for t in tensors]
        self.arrived[microbatch] = leaves
        self.values[microbatch] = unflatten(spec, leaves)

    def ready(self, microbatch: int) -> Value:
        """The value, as soon as it is there: leaves of a graph of its own."""
        if self.values[microbatch] is None:
            leaves = self.wait_for(microbatch)
            layout = self.incoming[microbatch]
            if layout is not None and layout.spec is not None:  # else handed over on this rank, and nothing in it
                for place, tensor in enumerate(layout.tensors):
                    assert tensor is not None, "only gradients may be missing"
                    if tensor.distributed is not None and self.mesh is not None:
                        leaves[place] = unwire(leaves[place], tensor, self.mesh(tensor.distributed))
                    if tensor.requires_grad and self.grad:
                        leaves[place].requires_grad_()
                self.values[microbatch] = leaves[0] if layout.spec is SINGLE else unflatten(layout.spec, leaves)
        return self.values[microbatch]

    def read(self, microbatch: int) -> None:
        """A stage of this rank needs the value no longer. When none does it is let go, and in training its gradients stay."""
        self.reads[microbatch] += 1
        if self.reads[microbatch] == self.readers:
            self.reads[microbatch] = 0
            left = [GradientAlone(leaf.grad) for leaf in self.arrived[microbatch] or ()] if self.grad else None
            self.arrived[microbatch] = left  # type: ignore[assignment]  # in the place of leaves, of which only that is asked
            self.values[microbatch] = None

    # -- backward

    def grads(self, microbatch: int) -> list[Tensor | None]:
        """The gradients of the leaves, which are let go."""
        leaves = self.arrived[microbatch] or ()
        self.arrived[microbatch] = self.values[microbatch] = None
        return [leaf.grad for leaf in leaves]

    def send(self, microbatch: int) -> None:
        """SEND_B. Nothing is sent before all of it has been found to be as expected.

        In a cold step there is a message even without a gradient, so that both ends always count alike.
        """
        known, leaves = self.outgoing[microbatch], self.arrived[microbatch] or ()
        self.arrived[microbatch] = self.values[microbatch] = None
        assert known is None or len(leaves) == len(known.tensors), "what goes back is what has arrived"
        grads: list[Tensor | None] = []  # for the description, where one is needed
        tensors: list[Tensor] = []
        for place, leaf in enumerate(leaves):
            grad, expected = leaf.grad, None if known is None else known.tensors[place]
            if grad is None:
                grad = None if expected is None else expected.zeros(leaf.device)
            elif known is not None and expected is None:
                what = "none in the first step with inputs of these shapes, and one now"
                raise self._changed(microbatch, place, leaf, what)
            elif grad.dtype is not leaf.dtype or grad.shape != leaf.shape:
                raise self._changed(microbatch, place, leaf, _name(grad))
            elif expected is not None and expected.distributed is not None and not expected.matches(grad):
                raise self._changed(microbatch, place, leaf, f"{_name(grad)} spread in another way")
            if grad is not None:
                grad = dense(grad)
                tensors.append(wire(grad))
            if known is None:
                grads.append(grad)
        if known is not None:
            for tensor in tensors:
                self.channel.post(tensor)
        else:
            layout = Layout.of(grads)
            self.channel.post_described(layout.encode(), tensors)
            self.outgoing[microbatch] = layout

    def _changed(self, microbatch: int, place: int, leaf: Tensor, what: str) -> ShapeError:
        return ShapeError(
            f"microbatch {microbatch}: the gradient of tensor {place} of stage {self.producer}'s output ({_name(leaf)}) is "
            f"{what}; expected what the first step had. A hook that returns another type or shape must be mended; a model "
            "whose graph changes from step to step needs a schedule made with dynamic=True"
        )

    def clear(self) -> None:
        super().clear()
        self.values[:] = [None] * len(self.values)
        self.reads[:] = [0] * len(self.reads)


class Outbox(MessageBox[Tensor | None]):
    """What a stage of this rank gave to one rank, by microbatch: `arrived` are its gradients."""

    def __init__(self, stage: int, num_microbatches: int, channel: Channel | None, *, grad: bool) -> None:
        super().__init__(num_microbatches, channel, grad=grad)
        self.stage = stage
        self.inbox: Inbox | None = None  # where a consumer on this rank looks
        self.ordered = False  # tensors keep the order of their dimensions in memory, by which random numbers are drawn
        self.select: tuple[int, ...] | None = None  # which outputs of the stage; None: the output as it is
        self.tensors: list[Sequence[Tensor] | None] = [None] * num_microbatches
        self.specs: list[Spec | None] = [None] * num_microbatches
        self.meshes: dict[int, list[DeviceMesh | None]] = {}  # by microbatch: of DTensors that were sent

    # -- forward

    def keep(self, microbatch: int, tensors: Sequence[Tensor], spec: Spec) -> None:
        """After the forward: hand the value over to a stage of this rank, or keep it until it is sent."""
        if self.inbox is not None:
            self.inbox.put(microbatch, tensors, spec)
            return
        self.tensors[microbatch] = tensors
        self.specs[microbatch] = spec

    def chosen(self, output: object) -> Value:
        """What of a stage's output goes there; one value goes as it is, and needs no nest."""
        select = self.select
        if select is None or type(output) is not tuple:
            return output
        return output[select[0]] if len(select) == 1 else tuple([output[place] for place in select])

    def send(self, microbatch: int) -> None:
        """SEND_F. The value is released: its graph belongs to the pass of the microbatch."""
        tensors, spec, layout = self.tensors[microbatch], self.specs[microbatch], self.outgoing[microbatch]
        assert tensors is not None and spec is not None, "its forward has run"  # noqa: PT018
        if layout is not None:
            layout.check(tensors, spec, self.stage, microbatch)
            post = self.channel.post
            if self.ordered:
                for tensor in self._wired(tensors, layout):
                    post(tensor)
            else:
                for tensor in tensors:
                    post(wire(tensor))
        else:
            layout = Layout.of(tensors, spec, ordered=self.ordered)
            layout.check_device(self.channel.device, self.stage, microbatch)
            self.channel.post_described(layout.encode(), self._wired(tensors, layout))
            self.outgoing[microbatch] = layout
        for tensor in tensors if self.grad else ():
            if type(tensor) is not Tensor:
                self.meshes[microbatch] = [getattr(one, "device_mesh", None) for one in tensors]
                break
        self.tensors[microbatch] = self.specs[microbatch] = None

    def _wired(self, tensors: Sequence[Tensor], layout: Layout) -> list[Tensor]:
        pairs = zip(tensors, layout.tensors, strict=True)
        return [wire(tensor, None if known is None else known.order) for tensor, known in pairs]

    # -- backward

    def gradients(self, microbatch: int) -> list[Tensor | None]:
        """The gradients of what was sent, as soon as they are there."""
        if self.inbox is not None:
            return self.inbox.grads(microbatch)
        found = self.wait_for(microbatch)
        self.arrived[microbatch] = None
        layout, meshes = self.incoming[microbatch], self.meshes.pop(microbatch, ())
        for place, mesh in enumerate(meshes):
            expected = layout.tensors[place] if layout is not None else None
            if expected is not None and expected.distributed is not None:
                found[place] = unwire(found[place], expected, mesh)  # type: ignore[arg-type]  # there is one
        return found

    def left_over(self) -> list[int]:
        held = {microbatch for microbatch, tensors in enumerate(self.tensors) if tensors is not None}
        return sorted(held.union(super().left_over()))

    def clear(self) -> None:
        super().clear()
        self.tensors[:] = [None] * len(self.tensors)
        self.specs[:] = [None] * len(self.specs)
        self.meshes.clear()


def _name(tensor: Tensor) -> str:
    return str(TensorLayout.of(tensor))
