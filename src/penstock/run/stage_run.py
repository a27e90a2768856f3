"""StageRun: one stage at work: its forward and its backward, microbatch by microbatch, between its boxes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.errors import StageError
from penstock.nest import map_tensors, tensors_in
from penstock.parallel import unwrap
from penstock.run.boxes import Inbox, Outbox
from penstock.run.expected import check_given
from penstock.run.rng import MicrobatchRng
from penstock.stage.backward import Deferral, ManualWeight, backward_input, backward_weight, can_split, run_deferred
from penstock.stage.boundary import flatten, unflatten
from penstock.stage.engine import run_engine
from penstock.stage.forward import remember
from penstock.stage.keywords import accepted_keywords
from penstock.stage.offload import Elsewhere, HostMemory, Moves, Saved
from penstock.stage.recompute import Repeats
from penstock.stage.routes import Routes
from penstock.stage.stage import PipelineStage

ModuleCall = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]
"""Calls the module for a microbatch, with its arguments."""


@dataclass
class StepInputs:
    """What the user gave for one step, cut into microbatches."""

    args: list[tuple[Any, ...]] | None = None  # on the rank of the first stage
    kwargs: list[dict[str, Any]] = field(default_factory=list)
    targets: list[Any] | None = None  # on the rank of the last stage
    loss_kwargs: Mapping[str, Any] = field(default_factory=dict)
    weights: Sequence[float | Tensor] | None = None  # of the microbatches in the loss; None: each counts 1
    keep_outputs: bool = False
    loss_fn: Callable[..., Tensor] | None = None


class StageRun:
    """One stage of this rank, in one mode: training with a full or a split backward, or forward only."""

    def __init__(
        self,
        stage: PipelineStage,
        num_microbatches: int,
        *,
        inboxes: dict[int, Inbox],
        outboxes: list[Outbox],
        grad: bool,
        split: frozenset[int],
        rng: MicrobatchRng | None,
        repeated: frozenset[int] = frozenset(),
        moved: frozenset[int] = frozenset(),
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self.stage = stage
        self.module = stage.submod
        self.inboxes = inboxes
        self.outboxes = outboxes
        self.grad = grad
        self.rng = rng
        self.split = split  # the microbatches whose backward comes in two parts
        self.inputs = StepInputs()
        self.manual = stage.dw_builder if grad else None
        self.deferral = Deferral(self.module) if split and self.manual is None else None
        self.pending: list[Any] = [None] * num_microbatches
        self.repeated = repeated  # the microbatches whose forward is run again before the backward
        self.repeats = Repeats(self.module, num_microbatches, keyed=rng is not None) if repeated else None
        self.moved = moved  # those of which what the forward saved is moved away and back
        self.elsewhere = elsewhere or HostMemory()
        self.moves = Moves(self.module, threshold=self.elsewhere.threshold) if moved else None
        self.saved: list[Saved | None] = [None] * num_microbatches
        for outbox in outboxes:
            outbox.repeated = repeated
        self.losses: list[Tensor | None] = [None] * num_microbatches
        self.reported: list[Tensor | None] = [None] * num_microbatches  # of `board`, once they are there
        self.board: tuple[Tensor, ...] = ()  # a place for each loss of a step
        self.outputs: list[Any] = [None] * num_microbatches
        self.accepted = accepted_keywords(unwrap(self.module))
        self.chain = stage.routes is None
        self.bound: Sequence[Sequence[Any]] | None = None  # a captured stage's arguments, of each microbatch of a step
        self.taken = [] if stage.routes is None else [(box, _moves(stage.routes, box)) for box in inboxes.values()]
        self.box = next(iter(inboxes.values()), None)
        self.proved = not grad or not inboxes  # whether a forward has shown that it leaves its inputs alone
        self.copies = False  # whether it changes them in place, and is given copies
        self.checks_output = stage.output_args is not None
        if split and self.manual is None and not can_split(self.module):
            warnings.warn(
                f"stage {stage.stage_index} is scripted: its backward cannot be taken apart, so the input slot does all of "
                "it and the weight slot what is left. The gradients are right; the bubble is that of a full backward",
                stacklevel=2,
            )

    # -- the actions

    def forward(self, microbatch: int) -> None:
        """F."""
        args, kwargs = self.arguments(microbatch)
        call = self.call if self.proved else self.first_call
        if microbatch in self.repeated:
            call = partial(self.call_first, call)
        elif microbatch in self.moved:
            call = partial(self.call_saving, call)
        if self.rng is None:
            output = call(microbatch, args, kwargs)
        else:
            with self.rng.at(self.stage.stage_index, microbatch):
                output = call(microbatch, args, kwargs)
        for outbox in self.outboxes:
            outbox.keep(microbatch, output)
        if not self.grad:
            for inbox in self.inboxes.values():
                inbox.read(microbatch)

    def recompute(self, microbatch: int) -> None:
        """R."""
        args, kwargs = self.arguments(microbatch)
        with nullcontext() if self.rng is None else self.rng.at(self.stage.stage_index, microbatch):
            run = partial(self.call, microbatch, args, kwargs)
            output = self.repeats.again(microbatch, run)  # type: ignore[union-attr]
        for outbox in self.outboxes:
            outbox.keep_again(microbatch, output)

    def offload(self, microbatch: int) -> None:
        """O."""
        self.saved[microbatch].offload(self.elsewhere)  # type: ignore[union-attr]

    def load(self, microbatch: int) -> None:
        """L."""
        saved, self.saved[microbatch] = self.saved[microbatch], None
        saved.load()  # type: ignore[union-attr]

    def checked_forward(self, microbatch: int) -> None:
        """F of a cold step, if the user said what the shapes are."""
        index = self.stage.stage_index
        args, _ = self.arguments(microbatch)
        check_given(self.stage.input_args, args, stage=index, microbatch=microbatch, name="input_args")
        self.forward(microbatch)

    def first_call(self, microbatch: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first forward shows whether the module changes its input in place, which autograd refuses for a leaf.

        It then runs again, from the same random state and the same buffers, and gets copies from then on.
        """
        rewind = remember(self.module, args)
        try:
            output = self.call(microbatch, args, kwargs)
        except RuntimeError as error:
            if "leaf Variable that requires grad" not in str(error):
                raise
            rewind()
            self.copies = True
            output = self.call(microbatch, *self.arguments(microbatch))
        self.proved = True
        return output

    def call_first(self, call: ModuleCall, microbatch: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first of two runs: its graph, and whatever waits for its backward, is dropped at once."""
        output = self.repeats.first(microbatch, partial(call, microbatch), args, kwargs)  # type: ignore[union-attr]
        self.pending[microbatch] = self.losses[microbatch] = None
        return output

    def call_saving(self, call: ModuleCall, microbatch: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A run of which what autograd saves can be moved away."""
        inputs = tensors_in((args, kwargs))
        with self.moves.saving(inputs) as saved:  # type: ignore[union-attr]
            output = call(microbatch, args, kwargs)
        saved.leave(tensors_in(output))
        self.saved[microbatch] = saved
        return output

    def call(self, microbatch: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module, and on the last stage the loss."""
        if microbatch not in self.split:
            output = self.module(*args, **kwargs)
        elif self.deferral is not None:
            output, self.pending[microbatch] = run_deferred(self.deferral, self.module, args, kwargs)
        else:
            output = self.module(*args, **kwargs)
            self.pending[microbatch] = ManualWeight(self.manual)  # type: ignore[arg-type]
        if self.checks_output:
            given = (self.stage.output_args, output if type(output) is tuple else (output,))
            check_given(*given, stage=self.stage.stage_index, microbatch=microbatch, name="output_args")
        if self.stage.is_last:
            self.finish(microbatch, output)
        return output

    def finish(self, microbatch: int, output: Any) -> None:
        """The last stage: compute the loss, keep the output if it is asked for."""
        inputs = self.inputs
        if inputs.loss_fn is not None and inputs.targets is not None:
            loss = inputs.loss_fn(output, inputs.targets[microbatch], **inputs.loss_kwargs)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
                raise StageError(f"loss_fn returned {what}; expected a tensor with one number")
            if self.grad:
                self.losses[microbatch] = loss
            self.report(microbatch, loss.detach())
        if inputs.keep_outputs:
            self.outputs[microbatch] = detached(output) if self.grad else output

    def report(self, microbatch: int, loss: Tensor) -> None:
        """Copy a loss: itself it could keep its input's memory alive. All of a step lie in one piece of memory, since many
        small ones that stay would break the memory that activations come and go in into pieces."""
        if type(loss) is not Tensor:  # a DTensor stays one
            self.reported[microbatch] = loss.clone()
            return
        if not self.board or self.board[0].dtype is not loss.dtype:
            self.board = torch.empty(len(self.reported), dtype=loss.dtype, device=loss.device).unbind()
        place = self.reported[microbatch] = self.board[microbatch]
        place.copy_(loss.reshape(()))

    def backward(self, microbatch: int) -> None:
        """B."""
        roots, grads = self.seeds(microbatch)
        if roots:
            run_engine(tuple(roots), tuple(grads))
        if self.manual is not None:  # weight work made by hand, in the same breath
            weight = ManualWeight(self.manual)
            weight.build()
            weight.run()

    def backward_input(self, microbatch: int) -> None:
        """I."""
        roots, grads = self.seeds(microbatch)
        leaves = [leaf for inbox in self.inboxes.values() for leaf in inbox.arrived[microbatch] or ()]
        backward_input(roots, grads, self.pending[microbatch], inputs=leaves)

    def backward_weight(self, microbatch: int) -> None:
        """W."""
        pending, self.pending[microbatch] = self.pending[microbatch], None
        backward_weight(pending)

    # -- their parts

    def arguments(self, microbatch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the module is called with."""
        kwargs = self.inputs.kwargs[microbatch] if self.inputs.kwargs else {}
        if self.chain:
            if self.box is None:
                args = self.inputs.args[microbatch]  # type: ignore[index]
            else:
                value = self.box.ready(microbatch)
                if self.copies:
                    value = copied(value)
                args = (value,) if type(value) is Tensor else positional(value)
            if kwargs and self.accepted is not None:
                kwargs = {name: value for name, value in kwargs.items() if name in self.accepted}
            return args, kwargs
        if self.bound is None:
            self.bound = self.stage.routes.bind(self.inputs.args, self.inputs.kwargs, len(self.pending))  # type: ignore[union-attr]
        row = list(self.bound[microbatch])
        for inbox, places in self.taken:
            value = inbox.ready(microbatch)
            if self.copies:
                value = copied(value)
            for position, place in places:
                row[position] = value if place is None else value[place]
        return tuple(row), {}

    def seeds(self, microbatch: int) -> tuple[list[Tensor], list[Tensor]]:
        """What the backward starts from: outputs that have a gradient, and it; on the last stage the loss."""
        roots: list[Tensor] = []
        grads: list[Tensor] = []
        for outbox in self.outboxes:
            found = outbox.gradients(microbatch)
            for tensor, grad in zip(outbox.tensors[microbatch] or (), found, strict=True):
                if grad is not None and tensor.requires_grad:
                    roots.append(tensor)
                    grads.append(grad)
            outbox.tensors[microbatch] = outbox.specs[microbatch] = None
        loss = self.losses[microbatch]
        if loss is not None:
            self.losses[microbatch] = None
            if loss.requires_grad:
                weights = self.inputs.weights
                weight = 1.0 if weights is None else weights[microbatch]
                roots.append(loss)
                if isinstance(weight, Tensor):  # a number on a device, which is not read
                    grads.append(weight.to(loss.dtype).expand_as(loss))
                else:
                    grads.append(torch.full_like(loss, weight))
        return roots, grads

    # -- around a step

    def begin(self, inputs: StepInputs) -> None:
        self.inputs = inputs

    def results(self) -> tuple[list[Tensor], list[Any]]:
        """The losses of the step, and its outputs if they were asked for; by microbatch."""
        losses = [loss for loss in self.reported if loss is not None]
        return losses, list(self.outputs) if self.inputs.keep_outputs else []

    def left_over(self) -> list[str]:
        index = self.stage.stage_index
        found = [f"weight work of stage {index}, microbatch {m}" for m, p in enumerate(self.pending) if p is not None]
        found += [f"loss of microbatch {m}" for m, loss in enumerate(self.losses) if loss is not None]
        found += [f"saved tensors of stage {index}, microbatch {m}" for m, s in enumerate(self.saved) if s is not None]
        if self.repeats is not None:
            found += [f"a forward of stage {index} to be run again, microbatch {m}" for m in self.repeats.left_over()]
        return found

    def clear(self) -> None:
        size = len(self.pending)
        self.pending[:] = [None] * size
        self.saved[:] = [None] * size
        if self.repeats is not None:
            self.repeats.clear()
        self.losses[:] = [None] * size
        self.reported[:] = [None] * size
        self.board = ()
        self.outputs[:] = [None] * size
        self.inputs = StepInputs()
        self.bound = None
        if self.deferral is not None:
            self.deferral.reset()


def _moves(routes: Routes, box: Inbox) -> list[tuple[int, int | None]]:
    """Of what a captured stage reads in a box: to which argument each value goes, and where in the box it lies."""
    alone = len(box.places) == 1
    return [
        (position, None if alone else box.places.index(place))
        for position, (producer, place) in enumerate(routes.sources)
        if producer == box.producer
    ]


def positional(value: Any) -> tuple[Any, ...]:
    """A stage gets the tuple (or list) that the stage before it returned as its arguments, and anything else as one."""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return value
    return tuple(value) if isinstance(value, list) else (value,)


def copied(value: Any) -> Any:
    """The value, with copies of the leaves that need a gradient: those may be changed in place."""
    tensors, spec = flatten(value)
    return unflatten(spec, [tensor.clone() if tensor.requires_grad else tensor for tensor in tensors])


def detached(value: Any) -> Any:
    """The output without its graph; no copy."""
    return value.detach() if isinstance(value, Tensor) else map_tensors(Tensor.detach, value)
