"""Rows of unequal length in microbatches of even cost: what `Pipeline(group_rows=...)` does around a step.

Every rank groups the rows of its own copy of the batch, in the same way, so nobody has to be told. The loss of a microbatch
counts by its share of the rows, so the gradient is that of the batch; outputs come back in the order of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.balance import Grouped, group_rows
from penstock.batch import Microbatches, batch_size_of
from penstock.errors import SplitError
from penstock.nest import Value, map_tensors


@dataclass(frozen=True)
class GroupRows:
    """How rows are grouped: `lengths` is asked with the arguments of each step.

        rows = GroupRows(lambda tokens: (tokens != PAD).sum(1), cost=attention(1024))
        pipe = Pipeline(model, (tokens,), group_rows=rows)

    `cost` and `longest` are those of `penstock.balance.group_rows`.
    """

    lengths: Callable[..., Sequence[int] | Tensor]
    cost: Callable[[int], float] = float
    longest: float | None = None

    def grouped(self, num_microbatches: int, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Grouped:
        """The rows of each microbatch of this batch."""
        found = self.lengths(*args, **kwargs)
        try:
            lengths = [int(length) for length in (found.tolist() if isinstance(found, Tensor) else found)]
        except (TypeError, ValueError):
            given = f"tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise SplitError(f"group_rows gave a {given}; expected the length of each row, one number a row") from None
        rows = batch_size_of(args, kwargs)
        if rows != len(lengths):
            raise SplitError(
                f"group_rows: {len(lengths)} lengths for a batch of {rows} rows; expected one for each row"
            )
        return group_rows(lengths, num_microbatches, cost=self.cost, longest=self.longest)


@dataclass(frozen=True)
class StepBatch:
    """What a rank was given for a step, its rows in groups if the pipeline groups them."""

    args: tuple[Value, ...]
    kwargs: Mapping[str, Value]
    target: Value
    few: int | None = None  # how many microbatches it has, if fewer than the plan
    rows: Grouped | None = None
    problem: Exception | None = None  # why rows could not be grouped: all ranks hear of it in the step

    def grouped(self, by: GroupRows | None, num_microbatches: int, *, outputs: bool) -> StepBatch:
        """The same with its rows in groups. `outputs`: this rank is to give them in the order of the batch."""
        if by is None:
            return self
        try:
            if self.args or self.kwargs:
                rows = by.grouped(num_microbatches, self.args, self.kwargs)
                args, kwargs, target = in_groups(rows, (self.args, self.kwargs, self.target))
                return replace(self, args=args, kwargs=kwargs, target=target, rows=rows)
            if self.target is not None or outputs:
                raise SplitError(
                    "group_rows: step() without the model's arguments on a rank with a target, or with outputs; rows are "
                    "grouped by them. Give them there too: step(x, target=y)"
                )
        except Exception as error:  # noqa: BLE001  whatever the function of the user raises
            return replace(self, problem=error)
        return self

    def in_order(self, outputs: object) -> Value:
        """What came out of the microbatches one after another, its rows as they were in the batch."""
        if self.rows is None or outputs is None:
            return outputs
        place = torch.argsort(torch.tensor([row for rows in self.rows.rows for row in rows]))

        def sort(tensor: Tensor) -> Tensor:
            return tensor[place.to(tensor.device)] if tensor.dim() and tensor.size(0) == len(place) else tensor

        return map_tensors(sort, outputs)


def in_groups(grouped: Grouped, value: object) -> Value:
    """The value with every tensor of as many rows cut into these microbatches.

    in_groups(Grouped(rows=((0, 2), (1,)), costs=(1.0, 1.0)), torch.arange(3))
    """
    count = sum(map(len, grouped.rows))
    parts = [torch.tensor(rows) for rows in grouped.rows]

    def cut(tensor: Tensor) -> object:
        if not tensor.dim() or tensor.size(0) != count:
            return tensor
        return Microbatches([tensor[rows.to(tensor.device)] for rows in parts])

    return map_tensors(cut, value)
