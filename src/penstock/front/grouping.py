"""Schedules for batches with fewer rows than microbatches (`few_rows`, and evaluations)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.batch.policy import RowPolicy
from penstock.errors import SplitError
from penstock.front.ends import Ends, same_everywhere
from penstock.nest import Value
from penstock.plan import Plan
from penstock.run.schedule import Schedule

Make = Callable[[Plan], Schedule]
_NOTHING = -1  # in place of a number of rows


class FewRows:
    """Schedules for batches with fewer rows than microbatches, each made by `make` when it is first needed, and kept."""

    def __init__(self, usual: Schedule, ends: Ends, policy: RowPolicy) -> None:
        self.usual, self.ends, self.policy = usual, ends, policy
        self.made: dict[int, tuple[Plan, Schedule]] = {}  # with the plan that each was made of

    def of_step(self, args: tuple[Value, ...], kwargs: Mapping[str, Value], make: Make) -> Schedule:
        return self.of_few(self.policy.count(args, kwargs, self.usual.num_microbatches), make)

    def of_few(self, few: int | None, make: Make) -> Schedule:
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
    ) -> Schedule:
        """A schedule that cuts no more microbatches than there are rows; the same on every rank. `problem`: what is wrong with
        this rank's call already."""

        def look() -> int:
            if problem is not None:
                raise problem
            rows = self.policy.most_microbatches(args, kwargs)
            if rows == 0:
                raise SplitError("the batch has no rows; expected at least one")
            return _NOTHING if rows is None else rows

        mine = self.ends.ready("evaluate() or predict()", look)
        everyone = [int(number) for number in self.ends.of_each("evaluate() or predict()", mine)]
        given = {rank: {"rows": count} for rank, count in enumerate(everyone) if count != _NOTHING}
        same_everywhere("the batches", given, "Give every rank the same")
        return self.of_few(next((facts["rows"] for facts in given.values()), None), make)
