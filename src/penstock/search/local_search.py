"""Lane: the search with one placement, and one order of the microbatches.

Known schedules come first, then many runs of the list scheduler, the best of which are refined.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, product
from math import inf

from penstock.lower import merge_backward
from penstock.plan import Plan, StageGraph
from penstock.plan.actions import MICROBATCH_FIELD, MICROBATCH_SHIFT, microbatch_of
from penstock.schedules import generalized_interleaved
from penstock.schedules.registry import known_plans
from penstock.search.cp_sat import solve
from penstock.search.list_scheduler import Manner, list_schedule, packed
from penstock.search.lower_bound import floor
from penstock.search.priority_patterns import AsPlanned, BlockPattern, Groups, Pattern, late_splits
from penstock.search.search_problem import SearchJob
from penstock.simulate import Costs, Timeline, simulate

_ROUNDING = 1e-9
_ELITE = 2  # how many patterns of each family are refined side by side
_SEEDS = 0.4  # the share of the tries that start from nothing
_PATIENT = 0.9  # the share of the tries in which a change for the worse may stay
_WORSE = 0.004  # how much worse at most, at first
_FAMILIES: tuple[type[Pattern], ...] = (Groups, Groups, Groups, BlockPattern, AsPlanned)  # as often as they are refined
_USUAL = (Manner(0.0, 0.0), Manner(0.5, 0.0), Manner(0.5, 0.1), Manner(1.0, 0.35))


@dataclass(frozen=True)
class Searched:
    """The best schedule that was found, and how good it can be at most.

    search(job).plan  # beside it: its time, and the floor
    """

    plan: Plan
    costs: Costs
    floor: float  # no schedule with these costs, this memory and the placements that were tried ends before
    origin: str  # "search", "solver", or the name of the known schedule that nothing surpassed

    @cached_property
    def timeline(self) -> Timeline:
        return simulate(self.plan, self.costs)

    @property
    def makespan(self) -> float:
        return self.timeline.makespan

    @property
    def gap(self) -> float:
        """Gap to the lower bound, as a fraction of the bound: 0 is proved optimal, up to rounding."""
        longer = self.makespan / self.floor - 1 if self.floor else 0.0
        return longer if abs(longer) > _ROUNDING else 0.0


@dataclass
class LaneEntry:
    """A pattern that is being refined, and when its schedule ends."""

    end: float
    pattern: Pattern


class Lane:
    """The search for one job, from one seed. `end` is the shortest time so far."""

    def __init__(self, job: SearchJob, graph: StageGraph, seed: int, order: tuple[int, ...] | None = None) -> None:
        # The k-th microbatch of the job is the one with this number of the user's; None: they are as the user has them.
        self.order = order
        self.job, self.graph = (job if order is None else job.in_order(order)), graph
        self.asked = job
        self.bound = floor(job)
        self.end = inf
        self.best: Searched | None = None
        self.elite: dict[type[Pattern], list[LaneEntry]] = {}  # by family; the shortest first
        self.rng = random.Random(seed)

    def known(self) -> Iterator[Searched]:
        """The known schedules that fit the memory; they take the microbatches as they are."""
        for plan in self._plans if self.order is None else ():
            yield from self._better(plan, plan.name, than=self.end)

    def _better(self, plan: Plan, origin: str, *, than: float) -> Iterator[Searched]:
        """Return the result of a plan if it is shorter and fits the memory."""
        found = self._made(plan, origin)
        if found.makespan < than and self.job.holds(found.timeline):
            self.end, self.best = found.makespan, found
            yield found

    def told(self, found: Searched) -> Searched:
        """Return the result with the microbatches in the user's numbering."""
        if self.order is None:
            return found
        codes = [
            tuple(code & ~MICROBATCH_FIELD | self.order[microbatch_of(code)] << MICROBATCH_SHIFT for code in row)
            for row in found.plan.codes
        ]
        return replace(found, plan=found.plan.with_codes(codes), costs=self.asked.costs)

    @cached_property
    def _plans(self) -> list[Plan]:
        """The known schedules for this placement, whether they fit or not."""
        placement = self.job.placement
        several = self._groups if placement.num_stages >= 2 * placement.num_ranks else []
        groups = [generalized_interleaved.recipe(group, zero_bubble=True) for group in several]
        return [*known_plans(placement, self.job.num_microbatches, graph=self.graph, more=groups)]

    @property
    def _groups(self) -> list[int]:
        """Sizes of groups, from half the number of ranks to a little more than all: at most eight."""
        ranks = self.job.placement.num_ranks
        sizes = range(-(-ranks // 2), ranks + 3)
        return [*sizes[:: -(-len(sizes) // 8)]]

    def search(self, tries: int, *, afresh: bool) -> Iterator[Searched]:
        """That many runs of the list scheduler; gives what is better than all before. `afresh` begins with new patterns."""
        seeds = islice(self._starts(), max(1, int(tries * _SEEDS)) if afresh else 0)
        for number in range(tries):
            parent = None
            pattern = next(seeds, None)
            if pattern is None:
                if not self.elite:
                    return  # not even one microbatch after another fits
                parent = self._any_entry()
                pattern = parent.pattern.shaken(self.job, self.rng)
            listing = list_schedule(self.job, pattern.urgency(self.job), pattern.manner)
            if listing is None:
                continue
            end, done = listing
            worse = _WORSE * max(0.0, 1 - number / (tries * _PATIENT))
            self._keep(LaneEntry(end, pattern), parent, worse)
            if end < self.end * (1 - 1e-12):
                self.best = self._made(self._plan(packed(self.job, done, pattern.manner)), "search")
                self.end = self.best.makespan
                yield self.best

    def _plan(self, codes: tuple[tuple[int, ...], ...]) -> Plan:
        return Plan(self.job.placement, self.graph, self.job.num_microbatches, codes, "searched")

    def _made(self, plan: Plan, origin: str) -> Searched:
        """Return the result; adjacent I and W of a microbatch are merged into B if that is shorter."""
        plans = [plan, *(merge_backward(plan, everywhere=one) for one in (False, True))] if self.job.merges else [plan]
        found = (Searched(one, self.job.costs, self.bound, origin) for one in plans)
        return min(found, key=lambda one: one.makespan)

    def solve(self, effort: float, seed: int) -> Iterator[Searched]:
        """Let the exact solver go on from the best so far: it may give a better one, and raises the floor of the lane."""
        assert self.best is not None, "searched before"
        bound, codes = solve(self.job, self.best.timeline, floor=self.bound, effort=effort, seed=seed)
        self.bound = min(bound, self.end)
        if codes is not None:
            yield from self._better(self._plan(codes), "solver", than=self.end * (1 - 1e-12))

    def _any_entry(self) -> LaneEntry:
        """Every other time of the best family, otherwise of any; the better ones more often."""
        if self.rng.random() < 0.5:
            entries = min(self.elite.values(), key=lambda entries: entries[0].end)
        else:
            entries = self.elite[self.rng.choice([family for family in _FAMILIES if family in self.elite])]
        return entries[int(len(entries) * self.rng.random() ** 2)]

    def _keep(self, entry: LaneEntry, parent: LaneEntry | None, worse: float) -> None:
        """A child that is not much worse takes its parent's place; a new pattern joins if it is good and its time is new."""
        entries = self.elite.setdefault(type(entry.pattern), [])
        if parent is not None:
            if entry.end <= parent.end * (1 + worse):
                parent.end, parent.pattern = entry.end, entry.pattern
        elif all(abs(entry.end - other.end) > _ROUNDING * other.end for other in entries):
            entries.append(entry)
        entries.sort(key=lambda one: one.end)
        del entries[_ELITE:]

    def _starts(self) -> Iterator[Pattern]:
        """First what never fails: one microbatch after another. Then what is usual for the placement, then anything."""
        job, rng = self.job, self.rng
        wholes = late_splits(job) if job.merges else [()]
        yield Groups.of(job, Manner(whole=wholes[0]), group=1)
        loop = job.placement.kind == "loop"
        if loop:
            for whole, manner, group in product(wholes, _USUAL[:3], self._groups):
                yield Groups.of(job, replace(manner, whole=whole), group=group)
        for whole, manner, plan in product(wholes, _USUAL[1:3], self._plans):
            yield AsPlanned.of(job, plan, replace(manner, whole=whole))
        while True:
            if rng.random() < (0.2 if loop else 0.9):
                yield BlockPattern.any(job, rng)
            else:
                yield Groups.any(job, rng.choice(_USUAL), rng)
