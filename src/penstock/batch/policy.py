"""StepPolicy: how a batch becomes microbatches, how much each counts in the loss, and how outputs become one again.

A policy is immutable, the same on every rank, and sends nothing. `RowPolicy` is the one that schedules and pipelines use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.batch.batch import UNKNOWN, Args, Batch, Kwargs, Rows, Shares, Weights
from penstock.batch.group_rows import GroupRows, in_groups, in_order, order_of
from penstock.batch.merge_batch import merge_chunks
from penstock.batch.specs import Microbatches
from penstock.batch.split_batch import batch_size_of, sizes_of, split_batch, split_target
from penstock.batch.tensors import weights
from penstock.errors import SplitError
from penstock.nest import Value, map_tensors


class Split(NamedTuple):
    """A batch by microbatch. `args` is None if nothing was passed on this rank."""

    args: Sequence[Args] | None = None
    kwargs: Sequence[dict[str, Value]] = ()
    targets: Sequence[Value] | None = None
    row_order: Tensor | None = None  # undoes the grouping of rows


class StepPolicy(Protocol):
    """Decisions of a step that concern its batch. `Schedule(policy=...)` takes any object with these methods."""

    def count(self, args: Args, kwargs: Kwargs, most: int) -> int:
        """Return the number of microbatches for this batch, at most `most`."""
        ...

    def rows(self, args: Args, kwargs: Kwargs, target: Value) -> Rows:
        """Return the numbers of rows, which the ranks compare; `UNKNOWN` is compared with nothing."""
        ...

    def split(self, batch: Batch, args: Args, kwargs: Kwargs, target: Value) -> Split:
        """Split the arguments and the target into `batch.count` microbatches; a target of None is not split."""
        ...

    def weigh(self, batch: Batch) -> Shares:
        """Return the share of each microbatch in the loss of the batch, on the rank of the last stage."""
        ...

    def scale(self, device: torch.device) -> float | Tensor:
        """Return the factor of all losses before their backward. Called on every rank in every training step."""
        ...

    def merge(self, outputs: Sequence[Value], batch: Batch) -> Value:
        """Return one output for the batch, of one output per microbatch."""
        ...


@dataclass(frozen=True)
class RowPolicy:
    """Microbatches of consecutive rows, or of rows in groups of even cost.

    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss, policy=RowPolicy(mean=False))
    """

    args_spec: Value = None  # see `penstock.batch`; None: split along dimension 0
    kwargs_spec: Value = None
    target_spec: Value = None
    output_spec: Value = None
    mean: bool = True  # losses are means over their microbatch; False: they add up
    fewer: bool = False  # a batch of fewer rows than microbatches is split into fewer microbatches
    group_by: GroupRows | None = None  # in training steps
    # Shares of the microbatches, of the batch and the shares of their rows. None: the shares of the rows.
    weight_of: Callable[[Batch, Sequence[float]], Shares] | None = None
    scaler: torch.amp.GradScaler | None = None
    gather: Callable[[Tensor], Tensor] | None = None  # of each tensor of a merged output; None: as it is

    def count(self, args: Args, kwargs: Kwargs, most: int) -> int:
        if self.fewer:
            with suppress(SplitError):  # which `split` raises again
                return min(self.most_microbatches(args, kwargs) or most, most)
        return most

    def most_microbatches(self, args: Args, kwargs: Kwargs) -> int | None:
        """Return the number of rows, or of `Microbatches` that are passed; None without a batch."""
        ready = next((value for value in (*args, *kwargs.values()) if isinstance(value, Microbatches)), None)
        if ready is not None:
            return len(ready)
        return batch_size_of(args, kwargs, args_spec=self.args_spec, kwargs_spec=self.kwargs_spec)

    def rows(self, args: Args, kwargs: Kwargs, target: Value) -> Rows:
        """Count rows where the default rule splits: along the first dimension."""
        if args:
            arguments = UNKNOWN if self.args_spec is not None else _rows_of(args[0])
        else:  # all that have rows have as many
            known = map(_rows_of, kwargs.values()) if self.kwargs_spec is None else ()
            arguments = next((rows for rows in known if rows != UNKNOWN), UNKNOWN)
        return Rows(arguments, _rows_of(target) if self.target_spec is None else UNKNOWN)

    def split(self, batch: Batch, args: Args, kwargs: Kwargs, target: Value) -> Split:
        order, given = None, bool(args or kwargs)
        if self.group_by is not None and batch.train:
            if given:
                groups = self.group_by.grouped(batch.count, args, kwargs)
                args, kwargs, target = in_groups(groups, (args, dict(kwargs), target))
                order = order_of(groups)
            elif target is not None or batch.keep_outputs:
                raise SplitError(
                    "group_rows: step() without the model's arguments on a rank with a target, or with outputs; rows are "
                    "grouped by them. Give them there too: step(x, target=y)"
                )
        targets = None if target is None else split_target(target, batch.count, target_spec=self.target_spec)
        if not given:
            return Split(targets=targets)
        return Split(*self.split_arguments(batch.count, args, kwargs), targets, order)

    def split_arguments(
        self, count: int, args: Args, kwargs: Kwargs
    ) -> tuple[Sequence[Args], Sequence[dict[str, Value]]]:
        return split_batch(args, kwargs, count, args_spec=self.args_spec, kwargs_spec=self.kwargs_spec)

    def weigh(self, batch: Batch) -> Shares:
        if not self.mean:
            return None
        by_rows = row_shares(batch)
        if self.weight_of is None or batch.count == 1 or batch.targets is None:
            return by_rows
        return self.weight_of(batch, by_rows)

    def scale(self, device: torch.device) -> float | Tensor:
        return 1.0 if self.scaler is None else self.scaler.scale(torch.ones((), device=device))

    def merge(self, outputs: Sequence[Value], batch: Batch) -> Value:
        merged = merge_chunks(outputs, self.output_spec)
        if batch.row_order is not None:
            merged = in_order(batch.row_order, merged)
        return merged if self.gather is None else map_tensors(self.gather, merged)


def row_shares(batch: Batch) -> list[float]:
    """Return the share of each microbatch in the rows of the batch."""
    given = (batch.targets, batch.args, batch.kwargs)
    sizes = next((found for each in given if each for found in [sizes_of(each)] if found is not None), None)
    if sizes is None or len(set(sizes)) == 1 or not sum(sizes):
        return [1 / batch.count] * batch.count
    return [float(weight) for weight in weights(sizes)]


def total(losses: Tensor | Sequence[Value], shares: Weights | None) -> Value:
    """Return the loss of the batch, of the losses of its microbatches and their shares."""
    if shares is None:
        return sum(losses)
    return sum(_counted(share, loss) for share, loss in zip(shares, losses, strict=True))


def _counted(share: float | Tensor, loss: Value) -> Value:
    """A part of the loss of a batch; 0 where nothing counts, since the mean of nothing is no number."""
    if isinstance(share, Tensor):
        return torch.where(share > 0, share * loss, torch.zeros_like(share))
    return share * loss if share > 0 else 0.0


def _rows_of(value: object) -> int:
    """Return the rows of a tensor; those of a nested structure are unknown."""
    if isinstance(value, Microbatches):
        return sum(sizes_of(list(value)) or (UNKNOWN,))
    return value.shape[0] if isinstance(value, Tensor) and value.dim() else UNKNOWN
