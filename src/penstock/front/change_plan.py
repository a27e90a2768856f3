"""When to look for another plan: some steps are measured now and then, and the plan is changed if that is worth it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from penstock.errors import PlanError
from penstock.plan import Plan
from penstock.run.schedule import Schedule
from penstock.search import search
from penstock.simulate import Costs, Timeline, measured_costs, simulate

_FIRST, _EVERY, _MEASURED = 4, 100, 3  # the first steps are cold; then how often, and how many steps are measured
_TRIES = 10


@dataclass
class Replanner:
    """Watches the steps of a schedule: after some measured ones, `costs` are what they cost and the plan may be another."""

    gain: float  # the share of a step that another plan must save
    known: Costs  # what is known of the stages beside their times
    steps: int = 0
    costs: Costs | None = None
    timelines: list[Timeline] = field(default_factory=list)
    has_changed: bool = False  # whether the step before this one was the last of another plan

    @contextmanager
    def around(self, schedule: Schedule) -> Iterator[None]:
        """Around a step; all ranks count alike, so all measure the same steps."""
        at = self.steps - _FIRST if self.steps < _EVERY else self.steps % _EVERY
        self.steps += 1
        self.has_changed = False
        if not 0 <= at < _MEASURED:
            yield
            return
        with schedule.record() as recording:
            yield
        measured = recording.timeline  # those of another plan, or of a time long past, say nothing of this one
        self.timelines = [one for one in self.timelines if at and one.plan == measured.plan] + [measured]
        if at == _MEASURED - 1:
            self.costs = measured_costs(self.timelines, self.known)
            self.timelines = []
            self.has_changed = schedule.replan(self.costs, gain=self.gain, search=self._searched)

    def _searched(self, plan: Plan) -> list[Plan]:
        """One made to measure, which holds no more than the plan of now; a few tries, since the other ranks wait."""
        assert self.costs is not None, "measured before anything is searched"
        room = list(simulate(plan, self.costs).peak_memory)
        try:
            found = search(
                plan.num_ranks,
                plan.num_microbatches,
                self.costs,
                memory_limit=room,
                placement=plan.placement,
                graph=plan.graph,
                tries=_TRIES,
                reorder=False,  # the weight gradients are to be added up as now
            )
        except PlanError:  # what is recomputed or offloaded may hold less than any that is not
            return []
        return [found.plan]
