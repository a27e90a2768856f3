"""Rows of a batch in microbatches of even cost (`Pipeline(group_rows=...)`).

Every rank groups the rows of its own copy of the batch in the same way, without a message. The loss of a microbatch counts by
its share of the rows, so the gradient is that of the batch; outputs are returned in the order of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.balance import Grouped, group_rows
from penstock.batch.specs import Microbatches
from penstock.batch.split_batch import batch_size_of
from penstock.errors import SplitError
from penstock.nest import Value, map_tensors


@dataclass(frozen=True)
class GroupRows:
    """Rule by which rows are grouped: `lengths` is called with the arguments of each step.

        rows = GroupRows(lambda tokens: (tokens != PAD).sum(1), cost=attention(1024))
        pipe = Pipeline(model, (tokens,), group_rows=rows)

    `cost` and `longest` are those of `penstock.balance.group_rows`.
    """

    lengths: Callable[..., Sequence[int] | Tensor]
    cost: Callable[[int], float] = float
    longest: float | None = None

    def grouped(self, num_microbatches: int, args: tuple[Value, ...], kwargs: Mapping[str, Value]) -> Grouped:
        """Return the rows of each microbatch of this batch."""
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


def in_groups(grouped: Grouped, value: object) -> Value:
    """Return the value with every tensor of as many rows split into these microbatches.

    in_groups(Grouped(rows=((0, 2), (1,)), costs=(1.0, 1.0)), torch.arange(3))
    """
    count = sum(map(len, grouped.rows))
    parts = [torch.tensor(rows) for rows in grouped.rows]

    def split(tensor: Tensor) -> object:
        if not tensor.dim() or tensor.size(0) != count:
            return tensor
        return Microbatches([tensor[rows.to(tensor.device)] for rows in parts])

    return map_tensors(split, value)


def order_of(grouped: Grouped) -> Tensor:
    """Return the position of each row of the batch in the microbatches, one after another."""
    return torch.argsort(torch.tensor([row for rows in grouped.rows for row in rows]))


def in_order(order: Tensor, outputs: object) -> Value:
    """Return the outputs of grouped microbatches with their rows in the order of the batch."""

    def sort(tensor: Tensor) -> Tensor:
        return tensor[order.to(tensor.device)] if tensor.dim() and tensor.size(0) == len(order) else tensor

    return map_tensors(sort, outputs)
