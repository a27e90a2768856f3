"""Links, microbatches and ranks that differ from one another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.errors import PlanError
from penstock.lower import lower
from penstock.schedules import all_schedules, get_schedule
from penstock.simulate import Costs, Link, simulate


def slow_link(latency: float) -> Costs:
    """F = I = W = 10 on 8 ranks, the link between the last two delayed (PipeMorph, NSDI 2026)."""
    costs = Costs.per_rank(num_stages=8, forward=10.0, backward_input=10.0, backward_weight=10.0)
    return replace(costs, links=(Link(6, 7, latency), Link(7, 6, latency)))


@pytest.mark.parametrize(
    ("latency", "one_f_one_b", "zb_h2"), [(10.0, 1170.0, 800.0), (30.0, 1650.0, 1080.0), (60.0, 2370.0, 1560.0)]
)
def test_one_slow_link(latency: float, one_f_one_b: float, zb_h2: float) -> None:
    for name, expected in (("1f1b", one_f_one_b), ("zb-h2", zb_h2)):
        plan = get_schedule(name)(8, 24)
        assert simulate(plan, slow_link(latency)).makespan == expected
        assert simulate(lower(plan), slow_link(latency)).makespan == expected


def test_a_link_one_way_only() -> None:
    plan = get_schedule("gpipe")(2, 1)
    there = replace(Costs.unit(plan), links=(Link(0, 1, 5.0),))
    back = replace(Costs.unit(plan), links=(Link(1, 0, 7.0),))
    assert [simulate(plan, costs).makespan for costs in (there, back)] == [11.0, 13.0]


@pytest.mark.parametrize("recipe", all_schedules(), ids=lambda recipe: recipe.name)
def test_costs_that_are_the_same_for_all_change_nothing(recipe) -> None:  # type: ignore[no-untyped-def]
    plan = recipe(4, 6)
    costs = replace(Costs.unit(plan), latency=0.3, overhead=0.1)
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    said = replace(
        costs, latency=0.0, links=tuple(Link(a, b, 0.3) for a, b in pairs), microbatches=(1.0,) * 6, ranks=(1.0,) * 4
    )
    for each in (plan, lower(plan)):
        assert simulate(each, said).starts == simulate(each, costs).starts
        assert simulate(each, said).peak_memory == simulate(each, costs).peak_memory


def test_microbatches_of_unequal_size() -> None:
    plan = get_schedule("gpipe")(1, 3)
    costs = replace(Costs.unit(plan), microbatches=(1.0, 2.0, 0.5), overhead=0.25)
    timeline = simulate(plan, costs)
    assert timeline.makespan == 3 * 3.5 + 6 * 0.25
    assert timeline.peak_memory == (3.5,)


def test_messages_are_as_long_as_their_microbatch() -> None:
    plan = get_schedule("gpipe")(2, 2)
    costs = replace(Costs.unit(plan), output_bytes=(4.0, 4.0), bandwidth=2.0, microbatches=(1.0, 3.0))
    assert simulate(plan, costs).starts[1][0] == 1.0 + 2.0
    assert simulate(plan, costs).starts[1][1] == 4.0 + 6.0
    timeline = simulate(lower(plan), costs)
    assert [message.arrived - message.posted for message in timeline.messages()][:2] == [2.0, 6.0]


def test_a_rank_that_is_slow() -> None:
    plan = get_schedule("1f1b")(3, 5)
    timeline = simulate(plan, replace(Costs.unit(plan), ranks=(1.0, 2.0, 1.0)))
    assert timeline.busy == (15.0, 30.0, 15.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"microbatches": (1.0,)}, "costs with 1 microbatches, a plan with 4; expected one number for each"),
        ({"ranks": (1.0,)}, "costs with 1 ranks, a plan with 2"),
        ({"links": (Link(0, 2, 1.0),)}, "on 2 ranks; expected ranks from 0 to 1"),
    ],
)
def test_sizes_must_be_those_of_the_plan(change: dict[str, object], words: str) -> None:
    plan = get_schedule("1f1b")(2, 4)
    with pytest.raises(PlanError, match=words):
        simulate(plan, replace(Costs.unit(plan), **change))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="expected finite numbers"):
        replace(Costs.unit(plan), ranks=(1.0, -1.0))
