"""Messages in one order: proved for queues of every layout, for all schedules and for searched ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from penstock.errors import DeadlockError, PlanError
from penstock.lower import add_messages_in_one_order, lower
from penstock.plan import Op, Plan, check
from penstock.plan.actions import OP
from penstock.schedules import get_schedule
from penstock.search import search
from penstock.simulate import Costs, simulate
from tests.plans import RECIPES, plans


def proved(plan: Plan) -> None:
    """On every layout, with sends that block, and in batches."""
    check(plan, queues="one", sends="blocking")
    check(plan, queues="one", batches=True)
    check(plan, queues="pair", sends="blocking")
    check(plan, sends="blocking")


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16])
def test_every_schedule(name: str, ranks: int) -> None:
    recipe = RECIPES[name]
    for stages_per_rank in [recipe.stages_per_rank] if recipe.stages_per_rank else [1, 2, 3]:
        for microbatches in (1, ranks + 1):
            plan = recipe(ranks, microbatches, stages_per_rank=stages_per_rank)
            proved(lower(plan, queues="one", reduce=recipe.name != "forward"))


@settings(max_examples=100)
@given(plans())
def test_every_graph(plan: Plan) -> None:
    before = plan.codes
    proved(add_messages_in_one_order(plan))
    assert plan.codes is before  # pure


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_searched_schedules(ranks: int) -> None:
    """Stages of different cost, so that nothing known fits, in both placements."""
    for placement, stages_per_rank in (("loop", 1), ("v", 2)):
        num_stages = ranks * stages_per_rank
        forward = [1.0 + stage % 3 / 4 for stage in range(num_stages)]
        costs = Costs.per_stage(forward, [1.2 * f for f in forward], [0.8 * f for f in forward])
        found = search(ranks, ranks + 2, costs, placement=placement, tries=4)  # type: ignore[arg-type]
        proved(lower(found.plan, queues="one"))


def test_nothing_but_messages_is_added_and_computing_stays_in_order() -> None:
    plan = get_schedule("interleaved1f1b")(4, 8)
    lowered = add_messages_in_one_order(plan)
    messages = {Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B}
    assert [[c for c in row if c & OP not in messages] for row in lowered.codes] == [list(row) for row in plan.codes]
    assert sum(map(len, lowered.codes)) == sum(map(len, lower(plan).codes))


@pytest.mark.parametrize("name", ["1f1b", "interleaved1f1b", "zbv"])
def test_it_takes_no_longer_where_messages_take_no_time(name: str) -> None:
    plan = get_schedule(name)(4, 8)
    costs = Costs.unit(plan)
    assert simulate(lower(plan, queues="one"), costs).makespan == simulate(lower(plan), costs).makespan


def test_a_plan_that_is_lowered_or_cannot_run_is_refused() -> None:
    with pytest.raises(PlanError, match="holds its messages already"):
        add_messages_in_one_order(lower(get_schedule("1f1b")(2, 2)))
    with pytest.raises(DeadlockError, match=r"rank 0 at 0B0; .*check\(plan\) shows the cycle"):
        add_messages_in_one_order(Plan.of({0: ["0B0", "0F0"], 1: ["1F0", "1B0"]}))
