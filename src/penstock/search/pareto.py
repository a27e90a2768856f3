"""front(...): how much time which memory buys. The shortest schedule for each of several limits, beside the known ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal, NamedTuple

from penstock.checks import check_types
from penstock.errors import PlanError
from penstock.plan import Placement, Plan
from penstock.schedules import all_schedules
from penstock.search.search import placements_of, search
from penstock.search.search_problem import held_by_one
from penstock.simulate import Costs, Timeline, simulate

_LEVELS = 12  # limits that are searched, if they are not given


class Point(NamedTuple):
    """A schedule, by what its fullest rank holds and how long it takes.

    Point("zbv", memory=4.0, makespan=25.5)
    """

    memory: float
    makespan: float
    bubble: float
    name: str  # of the known schedule, or "searched"
    floor: float | None  # what no schedule with so much memory can beat; None: nobody asked
    plan: Plan

    @classmethod
    def of(cls, timeline: Timeline, name: str, floor: float | None) -> Point:
        """Return the point of a timeline."""
        held = max(timeline.peak_memory)
        return cls(held, timeline.makespan, timeline.bubble_makespan, name, floor, timeline.plan)

    @property
    def gap(self) -> float | None:
        """Gap to the lower bound, as a fraction of the bound; None if there is no bound."""
        if self.floor is None:
            return None
        return max(0.0, self.makespan / self.floor - 1) if self.floor else 0.0


class Front(NamedTuple):
    """`searched`: each is faster than all with less memory. `known`: every known schedule; one that has fewer stages a rank
    than were asked for has them joined.

    front(job).searched[0].makespan
    """

    searched: tuple[Point, ...]
    known: tuple[Point, ...]


def front(
    num_ranks: int,
    num_microbatches: int,
    costs: Costs,
    *,
    limits: Sequence[float] | None = None,
    placement: Placement | Literal["loop", "v"] | None = None,
    tries: int = 200,
    exact: float | None = None,
    seed: int = 0,
    progress: Callable[[Point], object] | None = None,
) -> Front:
    """The Pareto list of memory against makespan.

    `limits` are what each rank may hold, one search for each; without them, a dozen from a single microbatch to the memory
    of 1F1B, and what the known schedules hold, up to twice that. `exact` is the effort of the exact solver for each, as in
    `search`.

    >>> costs = Costs.per_rank(num_stages=4, stages_per_rank=2)
    >>> [(point.memory, point.makespan) for point in front(2, 4, costs, limits=(1, 2, 4), tries=20).searched]
    [(1.0, 16.5), (2.0, 12.5)]
    """
    check_types("front", PlanError, num_ranks=(num_ranks, int), num_microbatches=(num_microbatches, int))
    check_types("front", PlanError, costs=(costs, Costs), limits=(limits, Sequence[float] | None), tries=(tries, int))
    check_types("front", PlanError, exact=(exact, float | None))
    check_types("front", PlanError, placement=(placement, Placement | str | None), progress=(progress, Callable | None))
    placements = placements_of(placement, num_ranks, costs.num_stages)
    known = _known(num_ranks, num_microbatches, costs)
    searching = partial(search, num_ranks, num_microbatches, costs, tries=tries, exact=exact, seed=seed)
    searched: list[Point] = []
    for limit in sorted(limits) if limits is not None else _levels(placements, costs, known):
        found = searching(memory_limit=limit, placement=placement)
        if not searched or found.makespan < searched[-1].makespan * (1 - 1e-9):
            name = "searched" if found.origin in ("search", "solver") else found.origin
            searched.append(Point.of(found.timeline, name, found.floor))
            if progress is not None:
                progress(searched[-1])
    fewer = [point for point in known if point.plan.num_stages < costs.num_stages]  # what no search here can find
    return Front(_pareto([*searched, *fewer]), known)


def _pareto(points: Iterable[Point]) -> tuple[Point, ...]:
    """Those that are faster than all with no more memory."""
    found: list[Point] = []
    for point in sorted(points, key=lambda point: point[:2]):
        if not found or point.makespan < found[-1].makespan * (1 - 1e-9):
            found.append(point)
    return tuple(found)


def _known(num_ranks: int, num_microbatches: int, costs: Costs) -> tuple[Point, ...]:
    per_rank, rest = divmod(costs.num_stages, num_ranks)
    found = []
    for recipe in all_schedules():
        each = recipe.stages_per_rank or per_rank
        if not rest and per_rank % each == 0:
            plan = recipe(num_ranks, num_microbatches, stages_per_rank=each)
            if plan.has_backward:
                found.append(Point.of(simulate(plan, costs.joined(per_rank // each)), recipe.name, None))
    return tuple(sorted(found))


def _levels(placements: Iterable[Placement], costs: Costs, known: Sequence[Point]) -> list[float]:
    """Return memory limits to try: those of known schedules, and even steps from one microbatch to twice the memory of 1F1B."""
    held = [held_by_one(placement, costs) for placement in placements]
    ranks, least = len(held[0]), max(map(max, held))
    even = [least * (1 + (ranks - 1) * step / (_LEVELS - 1)) for step in range(_LEVELS)]
    levels = (*even, *(point.memory for point in known))
    return sorted({round(level, 9) for level in levels if least <= level <= 2 * least * ranks})
