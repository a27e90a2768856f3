"""Boxes: where the values of microbatches in flight lie, between the action that makes them and the one that takes them.

An `Inbox` holds what a producer stage gave to this rank, as fresh leaves: autograd gathers their gradients in `.grad`,
over all the stages of this rank that use them. An `Outbox` holds what a stage of this rank gave to one rank (perhaps
this one), with its graph, until its gradient comes back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from penstock.comm.framing import Receiving
from penstock.errors import ShapeError
from penstock.nest import Value
from penstock.run.channel import Channel
from penstock.run.layout import Description, GradLayout, Layout, TensorLayout, dense, unwire, wire
from penstock.run.message_box import MessageBox
from penstock.stage.boundary import SINGLE, Spec, flatten, unflatten
from penstock.stage.dtensors import DTensorLayout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MeshOf = Callable[[DTensorLayout], "DeviceMesh | None"]
"""What an arriving DTensor is put on."""


class GradientAlone(NamedTuple):
    """What stays of a leaf whose value is no longer needed."""

    grad: Tensor | None
    is_leaf: bool = True


class Inbox(MessageBox[Tensor, Layout, GradLayout]):
    """What the stage `producer` gave to this rank, by microbatch: `arrived` are leaves."""

    def __init__(self, producer: int, num_microbatches: int, channel: Channel | None, *, grad: bool) -> None:
        super().__init__(num_microbatches, channel, grad=grad)
        self.producer = producer
        self.readers = 1  # how many stages of this rank use it
        self.mesh: MeshOf | None = None
        self.places: tuple[int, ...] = ()  # which outputs of the producer these are, for a captured stage
        self.values: list[Value] = [None] * num_microbatches
        self.reads = [0] * num_microbatches
        self.repeated: frozenset[int] = frozenset()  # microbatches whose value nobody else on this rank holds

    # -- forward

    def put(self, microbatch: int, tensors: list[Tensor], spec: Spec) -> None:
        """Hand over on one rank: fresh leaves of the same memory."""
        leaves = [t.detach().requires_grad_(self.grad and t.requires_grad) for t in tensors]
        self.arrived[microbatch] = leaves
        self.values[microbatch] = unflatten(spec, leaves)

    def pull(self, microbatch: int) -> Receiving[None]:
        channel = self.channel
        description = Description.decode((yield from channel.receive_description()))
        self.arrived[microbatch] = yield from channel.receive([t.empty(channel.device) for t in description.tensors])
        self.incoming[microbatch] = description.layout()

    def ready(self, microbatch: int) -> Value:
        """The value, as soon as it is there: leaves of a graph of its own."""
        if self.values[microbatch] is None:
            leaves = self.wait_for(microbatch)
            layout = self.incoming[microbatch]
            if layout is not None:  # None: handed over on this rank, and nothing in it
                for place, tensor in enumerate(layout.tensors):
                    if tensor.distributed is not None and self.mesh is not None:
                        leaves[place] = unwire(leaves[place], tensor, self.mesh(tensor.distributed))
                    if tensor.requires_grad and self.grad:
                        leaves[place].requires_grad_()
                self.values[microbatch] = leaves[0] if layout.spec is SINGLE else unflatten(layout.spec, leaves)
        return self.values[microbatch]

    def read(self, microbatch: int) -> None:
        """In a forward-only plan: let go when the last stage of this rank has read it."""
        self.reads[microbatch] += 1
        if self.reads[microbatch] == self.readers:
            self.reads[microbatch] = 0
            self.arrived[microbatch] = self.values[microbatch] = None

    # -- backward

    def differentiated(self, microbatch: int) -> None:
        """After the backward of a stage of this rank that used it: the last of them needs its gradients alone."""
        self.reads[microbatch] += 1
        if self.reads[microbatch] == self.readers:
            self.reads[microbatch] = 0
            left = [GradientAlone(leaf.grad) for leaf in self.arrived[microbatch] or ()]
            self.arrived[microbatch] = left  # type: ignore[assignment]  # in the place of leaves, of which only that is asked
            self.values[microbatch] = None

    def grads(self, microbatch: int) -> list[Tensor | None]:
        """The gradients of the leaves, which are let go."""
        leaves = self.arrived[microbatch] or ()
        self.arrived[microbatch] = self.values[microbatch] = None
        return [leaf.grad for leaf in leaves]

    def send(self, microbatch: int) -> None:
        """SEND_B of a warm step. Nothing is sent before all of it has been found to be as expected."""
        layout, leaves = self.outgoing[microbatch], self.arrived[microbatch]
        self.arrived[microbatch] = self.values[microbatch] = None
        grads = []
        assert leaves is not None and layout is not None, "a warm step knows what goes back"  # noqa: PT018
        for place, (leaf, expected) in enumerate(zip(leaves, layout.tensors, strict=True)):
            grad = leaf.grad
            if expected is not None:
                if grad is None:
                    grad = expected.zeros(leaf.device)
                elif grad.dtype is not leaf.dtype or grad.shape != leaf.shape:
                    raise self._changed(microbatch, place, leaf, _name(grad))
                elif expected.distributed is not None and not expected.matches(grad):
                    raise self._changed(microbatch, place, leaf, f"{_name(grad)} spread in another way")
                grads.append(wire(dense(grad)))
            elif grad is not None:
                what = "none in the first step with inputs of these shapes, and one now"
                raise self._changed(microbatch, place, leaf, what)
        for grad in grads:
            self.channel.post(grad)

    def _changed(self, microbatch: int, place: int, leaf: Tensor, what: str) -> ShapeError:
        return ShapeError(
            f"microbatch {microbatch}: the gradient of tensor {place} of stage {self.producer}'s output ({_name(leaf)}) is "
            f"{what}; expected what the first step had. A hook that returns another type or shape must be mended; a model "
            "whose graph changes from step to step needs a schedule made with dynamic=True"
        )

    def send_described(self, microbatch: int) -> None:
        """SEND_B of a cold step. There is a message even without a gradient, so that both ends always count alike."""
        leaves = self.arrived[microbatch] or []
        grads = [None if grad is None else dense(grad) for grad in self.grads(microbatch)]
        for place, (leaf, grad) in enumerate(zip(leaves, grads, strict=True)):
            if grad is not None and (grad.dtype is not leaf.dtype or grad.shape != leaf.shape):
                raise self._changed(microbatch, place, leaf, _name(grad))
        layout = GradLayout.of([None if grad is None else TensorLayout.of(grad) for grad in grads])
        self.outgoing[microbatch] = layout
        self.channel.post_described(layout.encode(), [wire(grad) for grad in grads if grad is not None])

    def clear(self) -> None:
        super().clear()
        self.values[:] = [None] * len(self.values)
        self.reads[:] = [0] * len(self.reads)


class Outbox(MessageBox[Tensor | None, GradLayout, Layout]):
    """What a stage of this rank gave to one rank, by microbatch: `arrived` are its gradients."""

    def __init__(self, stage: int, num_microbatches: int, channel: Channel | None, *, grad: bool) -> None:
        super().__init__(num_microbatches, channel, grad=grad)
        self.stage = stage
        self.inbox: Inbox | None = None  # where a consumer on this rank looks
        self.select: tuple[int, ...] | None = None  # which outputs of the stage; None: the output as it is
        self.repeated: frozenset[int] = (
            frozenset()
        )  # microbatches whose forward is run again: nothing is kept till then
        self.tensors: list[list[Tensor] | None] = [None] * num_microbatches
        self.specs: list[Spec | None] = [None] * num_microbatches

    # -- forward

    def keep(self, microbatch: int, output: object) -> None:
        """After the forward: what goes there, and its nest."""
        tensors, spec = flatten(output if self.select is None else self.chosen(output))
        if self.inbox is not None:
            self.inbox.put(microbatch, tensors, spec)
            if not self.grad or microbatch in self.repeated:
                return
        self.tensors[microbatch] = tensors
        self.specs[microbatch] = spec

    def chosen(self, output: object) -> Value:
        """What of a stage's output goes there; one value goes as it is, and needs no nest."""
        select = self.select
        if select is None or type(output) is not tuple:
            return output
        return output[select[0]] if len(select) == 1 else tuple([output[place] for place in select])

    def keep_again(self, microbatch: int, output: object) -> None:
        """After a forward that was run again: the same with its graph, from which the backward starts."""
        self.tensors[microbatch], self.specs[microbatch] = flatten(self.chosen(output))

    def send(self, microbatch: int) -> None:
        """SEND_F of a warm step."""
        tensors, spec, layout = self.tensors[microbatch], self.specs[microbatch], self.outgoing[microbatch]
        assert tensors is not None, "its forward has run"
        layout.check(tensors, spec, self.stage, microbatch)  # type: ignore[union-attr, arg-type]  # as has one before it
        post = self.channel.post
        for tensor in tensors:
            post(wire(tensor))
        if not self.grad or microbatch in self.repeated:
            self._let_go(microbatch)

    def send_described(self, microbatch: int) -> None:
        """SEND_F of a cold step."""
        tensors, spec = self.tensors[microbatch] or [], self.specs[microbatch]
        assert spec is not None, "its forward has run"
        layout = Layout(tuple(map(TensorLayout.of, tensors)), spec)
        layout.check_device(self.channel.device, self.stage, microbatch)
        self.outgoing[microbatch] = layout
        self.channel.post_described(layout.encode(), list(map(wire, tensors)))
        if not self.grad or microbatch in self.repeated:
            self._let_go(microbatch)

    def _let_go(self, microbatch: int) -> None:
        """A value that went out stays for its gradient, unless there will be none, or another is made for it."""
        if not self.grad or all(tensor.grad_fn is None for tensor in self.tensors[microbatch] or ()):
            self.tensors[microbatch] = self.specs[microbatch] = None

    # -- backward

    def pull(self, microbatch: int) -> Receiving[None]:
        channel = self.channel
        layout = GradLayout.decode((yield from channel.receive_description()))
        assert self.outgoing[microbatch] is not None, "a gradient comes after its value; after poison comes poison"
        self.incoming[microbatch] = layout
        buffers = [None if tensor is None else tensor.empty(channel.device) for tensor in layout.tensors]
        self.arrived[microbatch] = yield from channel.receive(buffers)

    def gradients(self, microbatch: int) -> list[Tensor | None]:
        """The gradients of `tensors`, as soon as they are there."""
        if self.inbox is not None:
            return self.inbox.grads(microbatch)
        found = self.wait_for(microbatch)
        self.arrived[microbatch] = None
        layout = self.incoming[microbatch]
        if layout is not None and layout.distributed:
            return [
                grad if grad is None or t is None else unwire(grad, t, getattr(tensor, "device_mesh", None))
                for tensor, grad, t in zip(self.tensors[microbatch] or (), found, layout.tensors, strict=True)
            ]
        return found

    def left_over(self) -> list[int]:
        held = {microbatch for microbatch, tensors in enumerate(self.tensors) if tensors is not None}
        return sorted(held.union(super().left_over()))

    def clear(self) -> None:
        super().clear()
        self.tensors[:] = [None] * len(self.tensors)
        self.specs[:] = [None] * len(self.specs)


def _name(tensor: Tensor) -> str:
    return str(TensorLayout.of(tensor))
