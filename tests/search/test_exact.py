"""The exact solver: it proves what the search cannot, finds what it missed, and never claims more than is true."""

from __future__ import annotations

import sys
from dataclasses import replace
from math import inf, nan

import pytest

from penstock.errors import PlanError
from penstock.plan import Placement, check
from penstock.schedules import all_schedules
from penstock.search import search
from penstock.search.cp_sat import solve
from penstock.search.lower_bound import floor
from penstock.search.search_problem import SearchJob
from penstock.simulate import Costs, Link, simulate

UNLIKE = Costs.per_rank(num_stages=3, forward=1.3, backward_input=1.1, backward_weight=0.7, latency=0.2)


def test_what_the_search_leaves_open_is_found_and_proved() -> None:
    alone = search(3, 5, UNLIKE, memory_limit=2.5, tries=40)
    found = search(3, 5, UNLIKE, memory_limit=2.5, tries=40, exact=1.0)
    assert alone.gap > 0.0
    assert found.gap == 0.0
    assert found.floor > alone.floor
    assert found.makespan <= alone.makespan
    assert max(found.timeline.peak_memory) <= 2.5
    check(found.plan)
    assert search(3, 5, UNLIKE, memory_limit=2.5, tries=40, exact=1.0).plan == found.plan


def test_a_better_order_comes_from_the_solver() -> None:
    """Microbatches of unequal size: the search is told to take them in the order of their numbers, which is not the best."""
    costs = replace(Costs.per_rank(num_stages=3), microbatches=(1.0, 2.0, 0.5))
    alone = search(3, 3, costs, tries=20, reorder=False)
    found = search(3, 3, costs, tries=20, reorder=False, exact=1.0)
    assert found.origin == "solver"
    assert found.makespan < alone.makespan
    assert found.gap == 0.0


@pytest.mark.parametrize(
    "costs",
    [
        replace(Costs.per_rank(num_stages=4, stages_per_rank=2), backward=(0.7,) * 4),
        Costs.per_rank(num_stages=4, stages_per_rank=2, overhead=0.2),
        Costs.per_rank(num_stages=4, stages_per_rank=2, overlap=1.1),
        Costs.per_rank(num_stages=4, stages_per_rank=2, forward=1 / 3, backward_weight=2**0.5, held_to_weight=2.0),
        replace(Costs.per_rank(num_stages=4, stages_per_rank=2), links=(Link(0, 1, 0.7),), ranks=(1.0, 1.7)),
    ],
    ids=["cheap whole backward", "overhead", "fused pairs", "no whole numbers", "link and rank"],
)
@pytest.mark.parametrize("limit", [2.0, None])
def test_no_known_schedule_beats_what_is_proved(costs: Costs, limit: float | None) -> None:
    """The solver begins with the slowest that is known, so nothing but its model keeps it from claiming too much."""
    for place in (Placement.loop, Placement.v):
        job = SearchJob.of(place(2, 2), 3, costs, limit)
        plans = [recipe(2, 3, stages_per_rank=2) for recipe in all_schedules() if recipe.stages_per_rank in (None, 2)]
        plans.append(search(2, 3, costs, memory_limit=limit, placement=job.placement, tries=5).plan)
        known = [simulate(plan, costs) for plan in plans if plan.has_backward and plan.placement == job.placement]
        times = {timeline.makespan: timeline for timeline in known if job.holds(timeline)}
        bound, codes = solve(job, times[max(times)], floor=floor(job), effort=0.1, seed=0)
        assert codes is not None
        assert floor(job) <= bound <= min(times) * (1 + 1e-9)


@pytest.mark.parametrize("effort", [0.0, -1.0, nan, inf])
def test_an_effort_is_a_number_above_0(effort: float) -> None:
    with pytest.raises(PlanError, match="expected a number above 0"):
        search(2, 2, Costs.per_rank(num_stages=2), tries=2, exact=effort)


def test_without_the_solver_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(PlanError, match=r"pip install \"penstock\[solver\]\""):
        search(3, 5, UNLIKE, memory_limit=2.5, tries=5, exact=1.0)
