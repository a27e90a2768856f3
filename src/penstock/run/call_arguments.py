"""CallArguments: what the module of a stage is called with, microbatch by microbatch. And shapes that the user gave for a stage
(`input_args`, `output_args`), held against what really comes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from penstock.batch import Microbatches
from penstock.batch.batch import NO_BATCH, Batch
from penstock.comm.messages import kind_of
from penstock.errors import ShapeError, StageError
from penstock.nest import Value
from penstock.parallel import unwrap
from penstock.run.boxes import Inbox
from penstock.stage.boundary import flatten, unflatten
from penstock.stage.pipeline_stage import PipelineStage, Routes, accepted_keywords


class CallArguments:
    """What lies in the boxes of a stage and what the user gave for the step, put together as the module takes it."""

    def __init__(self, stage: PipelineStage, boxes: Sequence[Inbox], num_microbatches: int) -> None:
        self.num_microbatches = num_microbatches
        self.routes = stage.routes  # None: a chain, in which the module reads all that the stage before returns
        self.accepted = accepted_keywords(unwrap(stage.submod))
        self.bound: Sequence[Sequence[Value]] | None = None  # of a captured stage, for each microbatch of a step
        self.taken = [] if stage.routes is None else [(box, _moves(stage.routes, box)) for box in boxes]
        self.box = boxes[0] if boxes else None
        self.inputs = NO_BATCH
        self.copies = False  # whether the module changes its inputs in place, and is given copies
        self.kind = stage.device.type
        self.eager = True  # whether it is called as it is, not compiled

    def begin(self, inputs: Batch) -> None:
        self.inputs, self.bound = inputs, None

    def of(self, microbatch: int) -> tuple[tuple[Value, ...], dict[str, Value]]:
        """The arguments of a microbatch, as soon as they are there."""
        inputs, copies = self.inputs, self.inputs.copies
        if self.routes is None:
            kwargs: Value = inputs.kwargs and (
                inputs.kwargs[microbatch] if copies is None else copies.of(inputs.kwargs, microbatch)
            )
            if self.box is None:
                given: Value = inputs.args
                args = given[microbatch] if copies is None else copies.of(given, microbatch)
            else:
                value = self.lent(self.box.ready(microbatch))
                args = (value,) if type(value) is Tensor else positional(value)
            if kwargs and self.accepted is not None:
                kwargs = {name: value for name, value in kwargs.items() if name in self.accepted}
            return args, kwargs or {}
        if self.bound is None:
            self.bound = self.routes.bind(inputs.args, inputs.kwargs, self.num_microbatches)
        row = list(self.bound[microbatch] if copies is None else copies.of(self.bound, microbatch))
        for inbox, places in self.taken:
            value = self.lent(inbox.ready(microbatch))
            for position, place in places:
                row[position] = value if place is None else value[place]
        return tuple(row), {}

    def lent(self, value: Value) -> Value:
        """What arrived, as the module gets it: copies, if it changes what it is given in place. Autocast keeps casts of leaves
        until the step is over; of views it does not."""
        if self.copies:
            return changed(value, _copied)
        if self.eager and torch.is_autocast_enabled(self.kind) and torch.is_autocast_cache_enabled():
            return changed(value, lambda tensor: tensor.view_as(tensor))
        return value


def _moves(routes: Routes, box: Inbox) -> list[tuple[int, int | None]]:
    """For each value that a captured stage reads in a box: to which argument it goes, and where in the box it lies."""
    alone = len(box.places) == 1
    return [
        (position, None if alone else box.places.index(place))
        for position, (producer, place) in enumerate(routes.sources)
        if producer == box.producer
    ]


def positional(value: object) -> tuple[Value, ...]:
    """A stage gets the tuple (or list) that the stage before it returned as its arguments, and anything else as one."""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return value
    return tuple(value) if isinstance(value, list) else (value,)


def changed(value: object, change: Callable[[Tensor], Tensor]) -> Value:
    """The value, with something else in place of each leaf that needs a gradient."""
    tensors, spec = flatten(value)
    return unflatten(spec, [change(tensor) if tensor.requires_grad else tensor for tensor in tensors])


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy that the module may change in place. The gradient of a DTensor's copy may have other placements than that of
    the DTensor, by which steps would differ from the first: those stay as they are."""
    return tensor if hasattr(tensor, "placements") else tensor.clone()


def check_given(stage: PipelineStage, value: object, *, microbatch: int, name: str) -> None:
    """Raise unless the tensors of `value` have the shapes and types that the stage has under that name."""
    expected, found = tensors_given(getattr(stage, name)), tensors_given(value)
    if [(t.shape, t.dtype) for t in expected] != [(t.shape, t.dtype) for t in found]:
        said, there = (", ".join(map(kind_of, tensors)) for tensors in (expected, found))
        raise ShapeError(
            f"microbatch {microbatch}, stage {stage.stage_index}: {name} says ({said}), but there is ({there}). "
            f"Give the shapes of one microbatch, or leave {name} out: they are found without it"
        )


def tensors_given(value: object) -> list[Tensor]:
    """The tensors of what stands for all arguments or all outputs of a stage; one of them may stand there by itself."""
    return flatten(tuple(value) if isinstance(value, tuple | list) else (value,))[0]


def shapes_of(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Hashable:
    """Return a key that distinguishes shapes of the input."""
    if not kwargs and len(args) == 1 and type(args[0]) is Tensor:
        return args[0].shape, args[0].dtype, args[0].requires_grad
    tensors, spec = flatten(_plain((args, dict(kwargs))))
    return tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors), spec


def _plain(value: Value) -> object:
    """What cannot cross a boundary may still be an argument (a mask object, a cache): its type stands for it."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple) or isinstance(value, Microbatches):
        return [_plain(item) for item in value]
    try:
        flatten(value)
    except StageError:
        return f"{type(value).__module__}.{type(value).__qualname__}"
    return value
