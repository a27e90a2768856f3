"""What holds for every schedule, whatever the sizes."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.lower import lower
from penstock.plan import Action, Op, Placement, Plan, StageGraph, check, dumps, loads
from penstock.plan.actions import parts, unpack
from penstock.schedules import Recipe, all_schedules
from penstock.simulate import Costs, simulate

RECIPES = {recipe.name: recipe for recipe in all_schedules()}


@st.composite
def plans(draw: st.DrawFn, max_ranks: int = 12, max_microbatches: int = 40) -> tuple[Recipe, Plan]:
    recipe = draw(st.sampled_from(list(RECIPES.values())))
    stages_per_rank = recipe.stages_per_rank or draw(st.integers(1, 5))
    num_ranks, num_microbatches = draw(st.integers(1, max_ranks)), draw(st.integers(1, max_microbatches))
    return recipe, recipe(num_ranks, num_microbatches, stages_per_rank=stages_per_rank)


@settings(max_examples=300)
@given(plans())
def test_every_plan_passes_the_check(case: tuple[Recipe, Plan]) -> None:
    check(case[1])


@pytest.mark.parametrize("name", RECIPES)
def test_small_sizes_without_gaps(name: str) -> None:
    """Fewer microbatches than ranks or stages, and numbers that divide nothing: where closed forms break first."""
    recipe = RECIPES[name]
    for num_ranks in range(1, 8):
        for stages_per_rank in [recipe.stages_per_rank] if recipe.stages_per_rank else [1, 2, 3]:
            for num_microbatches in range(1, 2 * num_ranks + 3):
                check(recipe(num_ranks, num_microbatches, stages_per_rank=stages_per_rank))


@given(plans(max_ranks=8, max_microbatches=20))
def test_each_action_stands_once_on_its_rank(case: tuple[Recipe, Plan]) -> None:
    recipe, plan = case
    for rank in range(plan.num_ranks):
        seen = Counter(unpack(part) for code in plan.codes[rank] for part in parts(code))
        expected: Counter[Action] = Counter()
        for stage in plan.placement.stages_of(rank):
            for microbatch in range(plan.num_microbatches):
                expected[Action(Op.F, stage, microbatch)] = 1
                if recipe.name == "forward":
                    continue
                whole = Action(Op.B, stage, microbatch)
                kinds = [Op.B] if whole in seen else [Op.I, Op.W]
                expected.update(Action(kind, stage, microbatch) for kind in kinds)
        assert seen == expected


@given(plans(max_ranks=6, max_microbatches=12))
def test_a_plan_survives_its_csv(case: tuple[Recipe, Plan]) -> None:
    _, plan = case
    assert loads(dumps(plan), name=plan.name) == plan


@given(plans(max_ranks=8, max_microbatches=20), st.tuples(*[st.floats(0.1, 10)] * 3), st.floats(0, 3))
def test_no_bubble_is_better_than_the_floor(
    case: tuple[Recipe, Plan], times: tuple[float, float, float], latency: float
) -> None:
    """The last rank cannot start before the first microbatch has come down to it, whatever the schedule."""
    _, plan = case
    per_rank = plan.num_stages // plan.num_ranks
    forward, backward_input, backward_weight = times
    costs = Costs.per_rank(
        num_stages=plan.num_stages,
        stages_per_rank=per_rank,
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
        latency=latency,
    )
    timeline = simulate(plan, costs)
    work = forward + (backward_input + backward_weight if plan.has_backward else 0)
    floor = plan.num_microbatches * work + (plan.num_ranks - 1) * (forward / per_rank + latency)
    assert timeline.makespan >= floor * (1 - 1e-9)
    assert timeline.longest_rank <= timeline.makespan * (1 + 1e-9)


@given(plans(max_ranks=6, max_microbatches=12))
def test_evaluation_is_the_same_plan_without_backwards(case: tuple[Recipe, Plan]) -> None:
    _, plan = case
    evaluation = plan.forward_only()
    check(evaluation)
    assert evaluation.num_actions == plan.num_stages * plan.num_microbatches


@given(plans(max_ranks=6, max_microbatches=12), st.data())
def test_a_smaller_batch_is_the_same_plan_without_the_last_microbatches(
    case: tuple[Recipe, Plan], data: st.DataObject
) -> None:
    _, plan = case
    fewer = plan.of_first(data.draw(st.integers(1, plan.num_microbatches)))
    check(fewer)
    check(lower(fewer))


@pytest.mark.parametrize("name", RECIPES)
def test_skip_connections_need_no_other_order(name: str) -> None:
    recipe = RECIPES[name]
    stages_per_rank = recipe.stages_per_rank or 2
    num_stages = 4 * stages_per_rank
    graph = StageGraph.chain(num_stages, skips=[(0, num_stages - 1), (0, 2), (1, num_stages - 1)])
    check(recipe(4, 10, stages_per_rank=stages_per_rank, graph=graph))


@pytest.mark.parametrize("name", RECIPES)
def test_one_rank_of_a_thousand_is_made_alone(name: str) -> None:
    recipe = RECIPES[name]
    sizes = recipe.sizes(1024, 4096, recipe.stages_per_rank or 2)
    tracemalloc.start()
    actions = recipe.rank_actions(sizes, 700)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(actions) >= 4096
    assert peak < 20_000_000


def test_the_sizes_are_checked() -> None:
    zbv = RECIPES["zbv"]
    with pytest.raises(PlanError, match=r"zbv with 3 stages a rank; it is made for 2.*interleaved1f1b"):
        zbv(4, 8, stages_per_rank=3)
    with pytest.raises(PlanError, match="num_microbatches=0"):
        zbv(4, 0)
    with pytest.raises(PlanError, match="num_ranks=-1"):
        zbv(-1, 4)


def test_v_shaped_schedules_come_back_to_the_first_rank() -> None:
    for name in ("zbv", "dualpipev", "v-half", "v-min"):
        assert RECIPES[name](3, 4).placement == Placement.v(3)
