"""Batches with fewer rows than there are microbatches: schedules that cut them into as many as they have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from penstock.batch import Microbatches, batch_size_of
from penstock.errors import RunError, SplitError
from penstock.front.ends import Ends, same_everywhere
from penstock.front.pipeline_options import StepOptions
from penstock.front.weighted import WeightedSchedule
from penstock.nest import Value
from penstock.plan import Plan

Make = Callable[[Plan], WeightedSchedule]
_NOTHING, _FAILED = -1, -2  # in place of a number of rows


class FewRows:
    """The schedules for such batches, each made when it is first needed, by `make`, and kept beside the usual one."""

    def __init__(self, usual: WeightedSchedule, options: StepOptions, ends: Ends) -> None:
        self.usual, self.options, self.ends = usual, options, ends
        self.made: dict[int, tuple[Plan, WeightedSchedule]] = {}  # with the plan that each was made of

    def count(self, args: tuple[Value, ...], kwargs: Mapping[str, Value]) -> int | None:
        """How many microbatches a step cuts this batch into, if `few_rows` has it cut into fewer than usual."""
        if self.options.few_rows:
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

    def of_evaluation(self, args: tuple[Value, ...], kwargs: Mapping[str, Value], make: Make) -> WeightedSchedule:
        """A schedule that cuts no more microbatches than there are rows; the same on every rank."""
        rows, problem = None, None
        try:
            rows = self._rows_of(args, kwargs)
            if rows == 0:
                raise SplitError("the batch has no rows; expected at least one")
        except SplitError as error:
            problem = error
        mine = _FAILED if problem is not None else _NOTHING if rows is None else rows
        everyone = [int(number) for number in self.ends.of_each("evaluate() or predict()", mine)]
        if problem is not None:
            raise problem
        if _FAILED in everyone:
            raise RunError(f"rank {everyone.index(_FAILED)} was given a batch that cannot be cut, and says why")
        given = {rank: {"rows": count} for rank, count in enumerate(everyone) if count != _NOTHING}
        same_everywhere("the batches", given, "Give every rank the same")
        return self.of_few(next((facts["rows"] for facts in given.values()), None), make)

    def _rows_of(self, args: tuple[Value, ...], kwargs: Mapping[str, Value]) -> int | None:
        """Into how many microbatches a batch can be cut: its rows, or those that are ready; None: there is no batch."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, Microbatches):
                return len(value)
        return batch_size_of(args, kwargs, **self.options.batch_specs)
