"""Predicted effects of improvements: a measured step, replayed in the simulator with some costs replaced.

print(explained(WhatIf.of([recording.timeline], choice.costs)))
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from penstock.errors import PenstockError
from penstock.lower import lower
from penstock.plan import Plan
from penstock.plan.ops import Op
from penstock.schedules import get_schedule
from penstock.schedules.registry import known_plans
from penstock.show.summary import percent, sizes, time_text
from penstock.simulate import Costs, Timeline, measured_costs, simulate

_SLOWER = 1.1  # so many times what its peers take is slow
_WORTH = 0.002  # of the step: what gives less is not worth a line
_TIMES = ("forward", "backward_input", "backward_weight", "backward")


class Mended(NamedTuple):
    """One thing that costs time, and the step without it."""

    what: str  # in plain words
    step: float  # seconds of the step if it were mended
    saved: float


@dataclass(frozen=True)
class WhatIf:
    """A measured step, and what the stages were expected to cost.

    `costs` are those of the step, microbatch by microbatch; `expected` are in any unit: only proportions between stages count.
    """

    plan: Plan
    costs: Costs
    expected: Costs
    measured: float  # seconds

    @classmethod
    def of(cls, timelines: Sequence[Timeline], expected: Costs) -> WhatIf:
        """From measured steps of one plan; the last one is explained, all tell what actions cost.

        WhatIf.of([recording.timeline], pipe.choice.costs)
        """
        costs = measured_costs(timelines, expected, per_microbatch=True)
        typical = statistics.median(timeline.makespan for timeline in timelines)
        return cls(timelines[0].plan, costs, expected, typical)

    @cached_property
    def step(self) -> float:
        """Step time that the simulator predicts from the measured costs."""
        return self._time(self.costs)

    def _time(self, costs: Costs) -> float:
        return simulate(self.plan, costs).makespan

    def mended(self) -> list[Mended]:
        """Possible improvements, the largest first."""
        steps = [(what, self._time(costs)) for what, costs in self._changes()]
        found = [*(Mended(what, step, self.step - step) for what, step in steps), self._waiting()]
        worth = [one for one in found if one.saved > _WORTH * self.step]
        return sorted(worth, key=lambda one: -one.saved)

    def _changes(self) -> Iterator[tuple[str, Costs]]:
        """Yield possible improvements, each with the improved costs."""
        # Ranks whose stages all take longer than was expected of them, by more than those of others.
        work, expected = _work(self.costs), _work(self.expected)
        share = [taken / (wanted or 1.0) for taken, wanted in zip(work, expected, strict=True)]
        stages_of = [self.plan.placement.stages_of(rank) for rank in range(self.plan.num_ranks)]
        ratios = [statistics.mean(share[stage] for stage in stages) for stages in stages_of]
        usual = statistics.median_low(ratios)
        for rank, ratio in enumerate(ratios):
            if ratio > _SLOWER * usual:
                words = f"rank {rank} is slower than its peers: it takes {ratio / usual:.2f} times as long for the same work"
                yield words, self._scaled(dict.fromkeys(stages_of[rank], usual / ratio))
        # The cut: stages that have more to do than others.
        mean = statistics.mean(work)
        for stage, taken in enumerate(work):
            if taken > _SLOWER * mean:
                words = f"stage {stage} has {taken / mean:.2f} times the work of the average stage"
                yield words, self._scaled({stage: mean / taken})
        if max(work) > _SLOWER * mean:
            yield "the cut is uneven: all stages together, with the same work in each", self._scaled_evenly()
        # Slow links, all messages, and microbatches of unequal length.
        for link in self.costs.links:
            if link.latency > self.costs.latency:
                others = tuple(other for other in self.costs.links if other != link)
                slow, quick = time_text(link.latency, "s"), time_text(self.costs.latency, "s")
                words = f"messages from rank {link.sender} to rank {link.receiver} take {slow} instead of {quick}"
                yield words, replace(self.costs, links=others)
        yield "messages: if they cost nothing", _without_messages(self.costs)
        yield "microbatches of unequal length: if all were of the average length", self._even

    def _waiting(self) -> Mended:
        ideal = sum(simulate(self.plan, _without_messages(self.costs)).busy) / self.plan.num_ranks
        rest = self._time(replace(_without_messages(self._scaled_evenly()), microbatches=None)) - ideal
        words = f"the schedule {self.plan.name}: waiting that even stages and free messages would leave"
        return Mended(words, self.step - rest, rest)

    @property
    def _even(self) -> Costs:
        """All microbatches of the average size."""
        size = statistics.mean(self.costs.microbatches or (1.0,))
        return replace(self._scaled(dict.fromkeys(range(self.plan.num_stages), size)), microbatches=None)

    def _scaled_evenly(self) -> Costs:
        """The same work in all stages."""
        work = _work(self.costs)
        mean = statistics.mean(work)
        return self._scaled({stage: mean / taken for stage, taken in enumerate(work) if taken})

    def _scaled(self, factors: dict[int, float]) -> Costs:
        """The costs with the times of some stages multiplied."""
        changed: dict[str, Any] = {
            name: tuple(time * factors.get(stage, 1.0) for stage, time in enumerate(column))
            for name, column in self.costs.columns().items()
            if name in _TIMES
        }
        return replace(self.costs, **changed)

    # -- what else could be done

    def schedules(self) -> list[tuple[str, float, float]]:
        """Other known schedules for these stages where they are: name, seconds of a step, and the most that a rank holds
        beside what it holds now.
        """
        now = max(simulate(self.plan, self.costs).peak_memory) or 1.0
        plans = known_plans(self.plan.placement, self.plan.num_microbatches, graph=self.plan.graph)
        timelines = [simulate(lower(plan), self.costs) for plan in plans if plan.name != self.plan.name]
        found = [(done.plan.name, done.makespan, max(done.peak_memory) / now) for done in timelines]
        return sorted(found, key=lambda one: one[1])

    def more_microbatches(self, times: int = 2) -> float | None:
        """Seconds of a step of so many times as many microbatches of the average size: a batch that is as much larger."""
        plan = self._again(self.plan.num_ranks, times * self.plan.num_microbatches)
        return None if plan is None else simulate(plan, self._even).makespan

    def more_ranks(self, times: int = 2) -> float | None:
        """Seconds of a step on so many times as many ranks, each stage cut into as many of equal cost."""
        plan = self._again(times * self.plan.num_ranks, self.plan.num_microbatches)
        if plan is None:
            return None
        changed: dict[str, Any] = {
            name: tuple(value / (1 if name == "output_bytes" else times) for value in column for _ in range(times))
            for name, column in self.costs.columns().items()
        }
        return simulate(plan, replace(self.costs, **changed, links=())).makespan

    def _again(self, num_ranks: int, num_microbatches: int) -> Plan | None:
        """The same schedule in another size; None: it has no name, or the stages are no chain or do not fit."""
        per_rank, rest = divmod(self.plan.num_stages, self.plan.num_ranks)
        if rest:
            return None
        try:
            return lower(get_schedule(self.plan.name)(num_ranks, num_microbatches, stages_per_rank=per_rank))
        except PenstockError:
            return None


def _work(costs: Costs) -> list[float]:
    """By stage: forward and backward of a microbatch."""
    return [costs.time(Op.F, stage) + costs.time(Op.B, stage) for stage in range(costs.num_stages)]


def _without_messages(costs: Costs) -> Costs:
    return replace(costs, latency=0.0, bandwidth=None, posting=0.0, links=())


def explained(what_if: WhatIf) -> str:
    """The answers in plain words, ranked, with seconds."""

    def seconds(value: float) -> str:
        return time_text(value, "s")

    step, plan = what_if.step, what_if.plan
    share = step / what_if.measured - 1 if what_if.measured else 0.0
    apart = f"{percent(abs(share))} {'less' if share < 0 else 'more'}"
    lines = [
        f"The step took {seconds(what_if.measured)} ({plan.name or 'a plan'}, {sizes(plan)}).",
        f"Replayed with the measured costs it takes {seconds(step)}, {apart}; all that follows is replayed.",
        "",
        "Where the time goes, and what the step would take without it:",
    ]
    lines += [
        f"{rank:>3}. {one.what}: {seconds(one.saved)} ({percent(one.saved / step)}); the step would take {seconds(one.step)}"
        for rank, one in enumerate(what_if.mended(), 1)
    ] or ["     nothing: the ranks are alike, the stages even, and nobody waits"]
    ideas = []
    for name, taken, memory in what_if.schedules()[:3]:
        change = f"{percent(abs(taken / step - 1))} {'less' if taken <= step else 'more'}"
        held = f", with {memory:.2f} times the activations" if memory else ""
        ideas.append(f"{name} for the same stages: {seconds(taken)} a step, {change}{held}")
    if (longer := what_if.more_microbatches()) is not None:
        gain = percent(1 - longer / (2 * step))
        ideas.append(f"twice as many microbatches of this size: {seconds(longer)} a step, {gain} less for a row")
    if (wider := what_if.more_ranks()) is not None:
        faster = f"{step / wider:.2f} times as fast"
        ideas.append(f"twice as many ranks, each stage cut in two: {seconds(wider)} a step, {faster}")
    ideas = ideas or ["nothing that is known by name: the plan is of no named schedule"]
    return "\n".join([*lines, "", "What else could be done:", *(f"  - {idea}" for idea in ideas)]) + "\n"
