"""Batches with fewer rows than there are microbatches: schedules that cut them into as many as they have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from penstock.batch import Microbatches, batch_size_of
from penstock.errors import SplitError
from penstock.front.ends import Ends
from penstock.front.pipeline_options import StepOptions
from penstock.front.spread import agree_on_rows
from penstock.front.weighted import WeightedSchedule
from penstock.nest import Value
from penstock.plan import Plan

Make = Callable[[Plan], WeightedSchedule]


class FewRows:
    """The schedules for such batches, each made when it is first needed, by `make`, and kept beside the usual one."""

    def __init__(self, options: StepOptions) -> None:
        self.options = options
        self.made: dict[int, tuple[Plan, WeightedSchedule]] = {}  # with the plan that each was made of

    def count(self, usual: WeightedSchedule, args: tuple[Value, ...], kwargs: Mapping[str, Value]) -> int | None:
        """How many microbatches a step cuts this batch into, if `few_rows` has it cut into fewer than usual."""
        if not self.options.few_rows or not (args or kwargs):
            return None
        with suppress(SplitError):  # which the step itself raises, on all ranks
            rows = self._rows_of(args, kwargs)
            return rows if rows and rows < usual.num_microbatches else None
        return None

    def of_few(self, usual: WeightedSchedule, few: int | None, make: Make) -> WeightedSchedule:
        """The usual schedule, or one of its plan with only so many microbatches."""
        if few is None:
            return usual
        plan, found = self.made.get(few, (None, usual))
        if plan is not usual.plan:
            found = make(usual.plan.of_first(few))
            self.made[few] = usual.plan, found
        found.steps, found._watches = usual.steps, usual._watches
        return found

    def of_evaluation(
        self, usual: WeightedSchedule, args: tuple[Value, ...], kwargs: Mapping[str, Value], ends: Ends, make: Make
    ) -> WeightedSchedule:
        """A schedule that cuts no more microbatches than there are rows; the same on every rank."""
        rows, problem = None, None
        try:
            rows = self._rows_of(args, kwargs) if args or kwargs else None
            if rows == 0:
                raise SplitError("the batch has no rows; expected at least one")
        except SplitError as error:
            problem = error
        rows = agree_on_rows(ends, rows, problem)
        return self.of_few(usual, rows if rows is not None and rows < usual.num_microbatches else None, make)

    def _rows_of(self, args: tuple[Value, ...], kwargs: Mapping[str, Value]) -> int | None:
        """Into how many microbatches a batch can be cut: its rows, or those that are ready."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, Microbatches):
                return len(value)
        specs = self.options
        return batch_size_of(args, kwargs, args_spec=specs.args_chunk_spec, kwargs_spec=specs.kwargs_chunk_spec)
