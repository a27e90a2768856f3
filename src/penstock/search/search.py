"""search(...): known schedules and many runs of the list scheduler, the best of which is refined; the same on every rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from penstock.errors import PlanError
from penstock.plan import Placement, Plan, StageGraph, check
from penstock.schedules import all_schedules
from penstock.search.floor import floor
from penstock.search.job import Job
from penstock.search.listing import Listing, Urgency
from penstock.simulate import Costs, Timeline, simulate

_ROUNDING = 1e-9
_AFRESH = 0.25  # how often the search starts anew instead of refining
_SPREADS = (0.2, 0.7, 2.0)  # of changes to the best urgency, in microbatches or places
_PATIENCES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Searched:
    """The best schedule that was found, and how good it can be at most."""

    plan: Plan
    costs: Costs
    floor: float  # no schedule with these costs and this placement ends before, whatever its memory
    origin: str  # "search", or the name of the known schedule that nothing surpassed

    @cached_property
    def timeline(self) -> Timeline:
        return simulate(self.plan, self.costs)

    @property
    def makespan(self) -> float:
        return self.timeline.makespan

    @property
    def gap(self) -> float:
        """How much longer it takes than the floor, as a share of it: 0 is proved to be the best, but for rounding."""
        longer = self.makespan / self.floor - 1 if self.floor else 0.0
        return longer if abs(longer) > _ROUNDING else 0.0


def search(
    num_ranks: int,
    num_microbatches: int,
    costs: Costs,
    *,
    memory_limit: float | Sequence[float] | None = None,
    placement: Placement | Literal["loop", "v"] | None = None,
    graph: StageGraph | None = None,
    tries: int = 200,
    seed: int = 0,
    progress: Callable[[int, Searched], object] | None = None,
) -> Searched:
    """A schedule for these costs, in which no rank ever holds more than `memory_limit` (one number, or one for each rank).

    `costs` says how many stages there are, any number a rank. `placement` is tried as a loop and as a V unless given. The
    search makes `tries` schedules for each, ends early when one is proved to be best, and gives the same for the same
    arguments, so every rank can do it by itself. `progress` is called with how many tries are done, and the best so far.

    >>> costs = Costs.per_rank(num_stages=4, forward=18.5, backward_input=18.1, backward_weight=9.3)
    >>> found = search(4, 8, costs, memory_limit=8, tries=20)
    >>> found.gap, max(found.timeline.peak_memory) <= 8
    (0.0, True)
    """
    best: Searched | None = None
    done = 0
    for where in _placements(placement, num_ranks, costs.num_stages):
        job = Job.of(where, num_microbatches, costs, memory_limit)
        for found in _tries(job, graph or StageGraph.chain(where.num_stages), tries, random.Random(seed)):
            done += 1
            if best is None or found.makespan < best.makespan * (1 - 1e-12):
                best = found
            if progress is not None:
                progress(done, best)
            if not found.gap:
                break
    assert best is not None, "the list scheduler always comes to an end"
    check(best.plan)
    return best


def _placements(given: Placement | Literal["loop", "v"] | None, num_ranks: int, num_stages: int) -> Iterable[Placement]:
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


def _tries(job: Job, graph: StageGraph, tries: int, rng: random.Random) -> Iterator[Searched]:
    """Known schedules that fit, then runs of the scheduler: in the order of known ones, afresh, or near the best so far."""
    bound = floor(job)
    known = []
    for found in _known(job, graph, bound):
        if all(peak <= limit * (1 + 1e-9) for peak, limit in zip(found.timeline.peak_memory, job.limits, strict=True)):
            yield found
        known.append(found.plan)
    best: tuple[float, Urgency] | None = None
    starts = [Urgency.by_plan(job, plan, patience=patience) for plan in known for patience in _PATIENCES]
    for number in range(tries):
        if number < len(starts):
            urgency = starts[number]
        elif best is None or rng.random() < _AFRESH:
            urgency = _any_urgency(job, rng)
        else:
            urgency = best[1].shaken(rng, rng.choice(_SPREADS))
        listing = Listing(job, urgency)
        if listing.complete and (best is None or listing.end < best[0]):
            best = listing.end, urgency
            codes = tuple(map(tuple, listing.codes))
            plan = Plan(job.placement, graph, job.num_microbatches, codes, "searched")
            yield Searched(plan, job.costs, bound, "search")


def _known(job: Job, graph: StageGraph, bound: float) -> Iterator[Searched]:
    """The known schedules for this placement, whether they fit or not."""
    ranks, per_rank = job.placement.num_ranks, job.placement.num_stages // job.placement.num_ranks
    for recipe in all_schedules():
        if recipe.stages_per_rank not in (None, per_rank):
            continue
        sizes = recipe.sizes(ranks, job.num_microbatches, per_rank)
        if recipe.place(sizes) != job.placement:
            continue
        plan = recipe(ranks, job.num_microbatches, stages_per_rank=per_rank, graph=graph)
        if plan.has_backward:
            yield Searched(plan, job.costs, bound, recipe.name)


def _any_urgency(job: Job, rng: random.Random) -> Urgency:
    ranks = job.placement.num_ranks
    return Urgency.by_lags(
        job,
        forward_lag=rng.uniform(0.0, ranks),
        backward_lag=rng.uniform(0.0, ranks),
        turn=rng.uniform(-2.0 * ranks, 2.0 * ranks),
        patience=rng.choice(_PATIENCES),
    )
