"""The rows of a batch in microbatches: in groups of even cost (`Pipeline(group_rows=...)`), or fewer than usual (`few_rows`).

Every rank groups the rows of its own copy of the batch, in the same way, so nobody has to be told. The loss of a microbatch
counts by its share of the rows, so the gradient is that of the batch; outputs come back in the order of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.balance import Grouped, group_rows
from penstock.batch import Microbatches, batch_size_of
from penstock.errors import SplitError
from penstock.front.ends import Ends, same_everywhere
from penstock.front.weighted import WeightedSchedule
from penstock.nest import Value, map_tensors
from penstock.plan import Plan

Make = Callable[[Plan], WeightedSchedule]
_NOTHING = -1  # in place of a number of rows


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


class FewRows:
    """Schedules for batches with fewer rows than microbatches, each made by `make` when it is first needed, and kept.

    `allowed`: steps may cut such batches, not evaluations alone. `specs` say how the arguments of a batch are cut.
    """

    def __init__(self, usual: WeightedSchedule, ends: Ends, *, allowed: bool, specs: Mapping[str, Value]) -> None:
        self.usual, self.ends, self.allowed, self.specs = usual, ends, allowed, specs
        self.made: dict[int, tuple[Plan, WeightedSchedule]] = {}  # with the plan that each was made of

    def count(self, args: tuple[Value, ...], kwargs: Mapping[str, Value]) -> int | None:
        """How many microbatches a step cuts this batch into, if `few_rows` has it cut into fewer than usual."""
        if self.allowed:
            with suppress(SplitError):  # which the step itself raises, on all ranks
                rows = self._rows_of(args, kwargs)
                return rows if rows and rows < self.usual.num_microbatches else None
        return None

    def of_few(self, few: int | None, make: Make) -> WeightedSchedule:
        """The usual schedule, or one of its plan with only so many microbatches."""
        usual = self.usual
        if few is None or few >= usual.num_microbatches:
            return usual
        plan, found = self.made.get(few, (None, usual))
        if plan is not usual.plan:
            found = make(usual.plan.of_first(few))
            self.made[few] = usual.plan, found
        found.steps, found._watches = usual.steps, usual._watches
        return found

    def of_evaluation(
        self, args: tuple[Value, ...], kwargs: Mapping[str, Value], make: Make, problem: Exception | None = None
    ) -> WeightedSchedule:
        """A schedule that cuts no more microbatches than there are rows; the same on every rank. `problem`: what is wrong with
        this rank's call already."""

        def look() -> int:
            if problem is not None:
                raise problem
            rows = self._rows_of(args, kwargs)
            if rows == 0:
                raise SplitError("the batch has no rows; expected at least one")
            return _NOTHING if rows is None else rows

        mine = self.ends.ready("evaluate() or predict()", look)
        everyone = [int(number) for number in self.ends.of_each("evaluate() or predict()", mine)]
        given = {rank: {"rows": count} for rank, count in enumerate(everyone) if count != _NOTHING}
        same_everywhere("the batches", given, "Give every rank the same")
        return self.of_few(next((facts["rows"] for facts in given.values()), None), make)

    def _rows_of(self, args: tuple[Value, ...], kwargs: Mapping[str, Value]) -> int | None:
        """Into how many microbatches a batch can be cut: its rows, or those that are ready; None: there is no batch."""
        ready = next((value for value in (*args, *kwargs.values()) if isinstance(value, Microbatches)), None)
        return batch_size_of(args, kwargs, **self.specs) if ready is None else len(ready)
