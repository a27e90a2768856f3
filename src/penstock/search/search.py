"""search(...): known schedules and many runs of the list scheduler, the best of which is refined; the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from math import inf
from typing import Literal

from penstock.checks import check_types
from penstock.errors import PlanError
from penstock.plan import Placement, StageGraph, check
from penstock.search.local_search import Lane, Searched
from penstock.search.search_problem import SearchJob
from penstock.simulate import Costs


def search(
    num_ranks: int,
    num_microbatches: int,
    costs: Costs,
    *,
    memory_limit: float | Sequence[float] | None = None,
    placement: Placement | Literal["loop", "v"] | None = None,
    graph: StageGraph | None = None,
    tries: int = 200,
    exact: float | None = None,
    reorder: bool = True,
    seed: int = 0,
    progress: Callable[[int, Searched], object] | None = None,
) -> Searched:
    """A schedule for these costs, in which no rank ever holds more than `memory_limit` (one number, or one for each rank).

    `costs` says how many stages there are, any number a rank. `placement` is tried as a loop and as a V unless given:
    half of the `tries` with all of them, the rest with the best one. The search ends early when a schedule is proved to be best,
    and gives the same for the same arguments, so every rank can do it by itself. `progress` is called with how many times
    something better was found, and the best so far. Where microbatches differ in size, other orders of them are tried as well:
    the small ones first, and the large ones in the middle; with `reorder=False` they keep theirs.

    `exact` lets CP-SAT of OR-Tools (`pip install "penstock[solver]"`) go on from there with so much effort (a unit is a few
    seconds on one core) for each placement: it may find better ones, and proves a higher floor, for small jobs often to the end.

    >>> costs = Costs.per_rank(num_stages=4, forward=18.5, backward_input=18.1, backward_weight=9.3)
    >>> found = search(4, 8, costs, memory_limit=8, tries=20)
    >>> found.gap, max(found.timeline.peak_memory) <= 8
    (0.0, True)
    """
    check_types("search", PlanError, num_ranks=(num_ranks, int), num_microbatches=(num_microbatches, int))
    check_types("search", PlanError, costs=(costs, Costs), graph=(graph, StageGraph | None), seed=(seed, int))
    check_types("search", PlanError, memory_limit=(memory_limit, float | Sequence[float] | None), tries=(tries, int))
    check_types("search", PlanError, exact=(exact, float | None), reorder=(reorder, bool | int))
    check_types(
        "search", PlanError, placement=(placement, Placement | str | None), progress=(progress, Callable | None)
    )
    if tries < 1:
        raise PlanError(f"tries={tries}; expected how many schedules are tried, from 1 up")
    if exact is not None and not 0 < exact < inf:
        raise PlanError(
            f"exact={exact:g}; expected a number above 0: the effort of the exact solver, of a few seconds each"
        )
    lanes = [
        Lane(job, graph or StageGraph.chain(job.placement.num_stages), seed, order)
        for where in placements_of(placement, num_ranks, costs.num_stages)
        for job in [SearchJob.of(where, num_microbatches, costs, memory_limit)]
        for order in (None, *(_orders(job.sizes) if reorder else ()))
    ]
    first = tries if len(lanes) == 1 else -(-tries // (2 * len(lanes)))
    best: Searched | None = None
    for done, found in enumerate(_better_ones(lanes, first, tries - first), 1):
        if best is None or found.makespan < best.makespan * (1 - 1e-12):
            best = found
        if progress is not None:
            progress(done, best)
    assert best is not None, "one microbatch after another fits"
    if exact is not None:
        floors = []
        for place in dict.fromkeys(lane.job.placement for lane in lanes):
            lane = min((lane for lane in lanes if lane.job.placement == place), key=lambda lane: lane.end)
            if lane.best is not None and lane.bound < best.makespan * (1 - 1e-9):
                best = min([best, *map(lane.told, lane.solve(exact, seed))], key=lambda found: found.makespan)
            floors.append(lane.bound)
        best = replace(best, floor=min(best.makespan, *floors))
    check(best.plan)
    return best


def _better_ones(lanes: list[Lane], first: int, rest: int) -> Iterator[Searched]:
    """All lanes for some tries, then the best of them for the rest. Their floor is the least of theirs.

    A lane whose own floor is no shorter than the best so far has nothing to give.
    """
    least = min(lane.bound for lane in lanes)

    def hopeful(lane: Lane) -> bool:
        return lane.bound < min(other.end for other in lanes) * (1 - 1e-9)

    def told(lane: Lane, gains: Iterable[Searched]) -> Iterator[Searched]:
        for found in gains:
            yield replace(lane.told(found), floor=least)
            if not hopeful(lane):
                break

    for lane in lanes:
        yield from told(lane, chain(lane.known(), lane.search(first, afresh=True) if hopeful(lane) else ()))
    lane = min(lanes, key=lambda lane: lane.end)
    if rest and hopeful(lane):
        yield from told(lane, lane.search(rest, afresh=False))


def _orders(sizes: Sequence[float]) -> Iterator[tuple[int, ...]]:
    """Other orders of microbatches of these sizes: the small ones first, and the large ones in the middle.

    A small microbatch fills the pipeline sooner, and leaves it sooner.

    >>> list(_orders((2.0, 1.0, 3.0, 4.0))), list(_orders((1.0, 1.0)))
    ([(1, 0, 2, 3), (1, 2, 3, 0)], [])
    """
    if len(set(sizes)) == 1:
        return
    up = sorted(range(len(sizes)), key=lambda number: (sizes[number], number))
    given = tuple(range(len(sizes)))
    yield from dict.fromkeys(order for order in (tuple(up), (*up[::2], *reversed(up[1::2]))) if order != given)


def placements_of(
    given: Placement | Literal["loop", "v"] | None, num_ranks: int, num_stages: int
) -> Iterable[Placement]:
    """The placements that are tried: what is given, or a loop and a V."""
    if isinstance(given, Placement):
        if (given.num_ranks, given.num_stages) != (num_ranks, num_stages):
            raise PlanError(
                f"a placement of {given.num_stages} stages on {given.num_ranks} ranks; expected {num_stages}, as in the costs, "
                f"on {num_ranks}"
            )
        return [given]
    per_rank, rest = divmod(num_stages, num_ranks)
    if rest:
        raise PlanError(
            f"costs of {num_stages} stages for {num_ranks} ranks; expected a multiple, or placement=Placement.of([...])"
        )
    makers = {"loop": Placement.loop, "v": Placement.v}
    if given is not None and given not in makers:
        raise PlanError(f"placement={given!r}; expected 'loop', 'v' or a Placement")
    wanted = makers if given is None else {given: makers[given]}
    return dict.fromkeys(make(num_ranks, per_rank) for make in wanted.values())
