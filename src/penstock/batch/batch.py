"""Batch: the data of one step, split into microbatches. `Schedule.prepare` makes it and `Schedule.run` runs it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from penstock.nest import Value

Args: TypeAlias = tuple[Value, ...]
Kwargs: TypeAlias = Mapping[str, Value]
Weights: TypeAlias = Sequence[float | Tensor]
"""One number per microbatch; those on a device are never read."""
Shares: TypeAlias = Weights | Callable[[Value, Value], Weights] | None
"""Share of each microbatch in the loss of the batch. A function is called with the output and the target of the first
microbatch, once their loss is computed, and returns the shares. None: the losses add up."""

UNKNOWN = -1  # number of rows where nothing was passed, or where no rule says which dimension has the rows


@dataclass(frozen=True, slots=True)
class Rows:
    """Numbers of rows of the model's arguments and of the target, as passed to one rank."""

    arguments: int = UNKNOWN
    target: int = UNKNOWN

    @property
    def uneven(self) -> bool:
        """True if input and target are known to have different numbers of rows, which some models need."""
        return UNKNOWN not in (self.arguments, self.target) and self.arguments != self.target

    def differs_from(self, first: Rows) -> str:
        """Return how these rows contradict those of the first stage's rank; "" if they do not."""
        for name, mine, theirs in (
            ("the input", self.arguments, first.arguments),
            ("the target", self.target, first.target),
        ):
            if UNKNOWN not in (mine, theirs) and mine != theirs:
                return f"{mine} rows of {name} here, {theirs} there"
        rows, targets = first.arguments, self.target
        if UNKNOWN not in (rows, targets) and (not rows or not targets or (targets % rows and rows % targets)):
            return f"{targets} rows of the target here, {rows} rows of the input there"
        return ""


class Copies(Protocol):
    """Copies of a batch from host memory to the device, one microbatch after the other."""

    def of(self, values: Sequence[Value], microbatch: int) -> Value: ...


@dataclass(frozen=True, slots=True)
class Batch:
    """Data of one step on one rank. A value: it may be run more than once.

    batch = schedule.prepare((x,), {}, target=y)
    outcome = schedule.run(batch)
    """

    count: int = 1  # microbatches
    train: bool = False  # whether the step has a backward
    keep_outputs: bool = False
    args: Sequence[Args] | None = None  # by microbatch; None: nothing was passed on this rank
    kwargs: Sequence[dict[str, Value]] = ()
    targets: Sequence[Value] | None = None  # on the rank of the last stage
    loss_fn: Callable[..., Tensor] | None = None
    loss_kwargs: Kwargs = field(default_factory=dict)
    shares: Shares = None
    scale: float | Tensor = 1.0  # of all losses before their backward; reported losses are without it
    row_order: Tensor | None = None  # undoes the grouping of rows in the outputs
    rows: Rows = Rows()  # compared between ranks
    shape_key: Hashable = None  # distinguishes shapes of the input, on the rank of the first stage
    copies: Copies | None = None  # None: all tensors are where they are needed
    given: Kwargs = field(default_factory=dict)  # arguments by name, as the caller passed them
    error: BaseException | None = None  # why the batch could not be split; `run` raises it on all ranks

    def weights(self, shares: Weights | None) -> Weights | None:
        """Return the factor of each loss before its backward: its share, and the scale. None: all factors are 1."""
        if not isinstance(self.scale, Tensor) and self.scale == 1.0:
            return shares
        return [self.scale * share for share in shares or [1.0] * self.count]


NO_BATCH = Batch()
"""The batch of a stage between two steps."""


def precise_on(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on devices that do not support it."""
    return torch.float32 if device.type == "mps" else torch.float64
