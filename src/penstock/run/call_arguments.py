"""CallArguments: what the module of a stage is called with, microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from penstock.parallel import unwrap
from penstock.run.boxes import Inbox
from penstock.run.inputs import StepInputs
from penstock.stage.boundary import flatten, unflatten
from penstock.stage.keywords import accepted_keywords
from penstock.stage.pipeline_stage import PipelineStage
from penstock.stage.routes import Routes


class CallArguments:
    """What lies in the boxes of a stage and what the user gave for the step, put together as the module takes it."""

    def __init__(self, stage: PipelineStage, boxes: Sequence[Inbox], num_microbatches: int) -> None:
        self.num_microbatches = num_microbatches
        self.routes = stage.routes  # None: a chain, in which the module reads all that the stage before returns
        self.accepted = accepted_keywords(unwrap(stage.submod))
        self.bound: Sequence[Sequence[Any]] | None = None  # a captured stage's arguments, of each microbatch of a step
        self.taken = [] if stage.routes is None else [(box, _moves(stage.routes, box)) for box in boxes]
        self.box = boxes[0] if boxes else None
        self.inputs = StepInputs()
        self.copies = False  # whether the module changes its inputs in place, and is given copies

    def begin(self, inputs: StepInputs) -> None:
        self.inputs, self.bound = inputs, None

    def of(self, microbatch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a microbatch, as soon as they are there."""
        inputs, feed = self.inputs, self.inputs.feed
        if self.routes is None:
            kwargs: Any = inputs.kwargs and (
                inputs.kwargs[microbatch] if feed is None else feed.of(inputs.kwargs, microbatch)
            )
            if self.box is None:
                given: Any = inputs.args
                args = given[microbatch] if feed is None else feed.of(given, microbatch)
            else:
                value = self.box.ready(microbatch)
                if self.copies:
                    value = copied(value)
                args = (value,) if type(value) is Tensor else positional(value)
            if kwargs and self.accepted is not None:
                kwargs = {name: value for name, value in kwargs.items() if name in self.accepted}
            return args, kwargs or {}
        if self.bound is None:
            self.bound = self.routes.bind(inputs.args, inputs.kwargs, self.num_microbatches)
        row = list(self.bound[microbatch] if feed is None else feed.of(self.bound, microbatch))
        for inbox, places in self.taken:
            value = inbox.ready(microbatch)
            if self.copies:
                value = copied(value)
            for position, place in places:
                row[position] = value if place is None else value[place]
        return tuple(row), {}


def _moves(routes: Routes, box: Inbox) -> list[tuple[int, int | None]]:
    """For each value that a captured stage reads in a box: to which argument it goes, and where in the box it lies."""
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
