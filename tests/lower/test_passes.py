"""The other passes: shards, reduction, merging; and one rank alone, which gives what all together give."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.lower import (
    Care,
    ReceivePolicy,
    add_reduce_grad,
    add_unshard_reshard,
    lower,
    lower_shares,
    merge_backward,
)
from penstock.plan import Op, Plan, StageGraph, check, dumps
from penstock.plan.actions import OP, STAGE, STAGE_SHIFT, key_of, parts, with_op
from penstock.schedules import Recipe, get_schedule
from penstock.simulate import Costs, simulate
from tests.plans import POLICIES, plans, sized


def most_unsharded(codes: tuple[int, ...]) -> int:
    most, now = 0, set()
    for code in codes:
        stage = code >> STAGE_SHIFT & STAGE
        if code & OP == Op.UNSHARD:
            now.add(stage)
        elif code & OP == Op.RESHARD:
            now.remove(stage)
        most = max(most, len(now))
    assert not now, "all is resharded in the end"
    return most


@given(plans(), st.integers(1, 4))
def test_shards(plan: Plan, limit: int) -> None:
    sharded = add_unshard_reshard(plan, limit)
    check(sharded)
    check(lower(plan, shards=True, max_unsharded=limit))
    pairs = any(len(parts(code)) == 2 for codes in plan.codes for code in codes)
    for codes in sharded.codes:
        assert most_unsharded(codes) <= (max(limit, 2) if pairs else limit)
    assert [[c for c in codes if c & OP not in (Op.UNSHARD, Op.RESHARD)] for codes in sharded.codes] == [
        [*codes] for codes in plan.codes
    ]


def test_shards_drawn() -> None:
    plan = Plan.of([["0F0", "1F0", "2F0", "2B0", "1B0", "0B0"]])
    there, back = "0UNSHARD,0F0,0RESHARD,1UNSHARD,1F0,1RESHARD,", ",1UNSHARD,1B0,1RESHARD,0UNSHARD,0B0,0RESHARD\n"
    assert dumps(add_unshard_reshard(plan, 1)) == there + "2UNSHARD,2F0,2B0,2RESHARD" + back
    two = "0UNSHARD,1UNSHARD,0F0,0RESHARD,2UNSHARD,1F0,2F0,2B0,2RESHARD,0UNSHARD,1B0,1RESHARD,0B0,0RESHARD"
    assert dumps(add_unshard_reshard(plan, 2)) == two + "\n"
    all_ahead = "0UNSHARD,1UNSHARD,2UNSHARD,0F0,1F0,2F0,2B0,2RESHARD,1B0,1RESHARD,0B0,0RESHARD"
    assert dumps(add_unshard_reshard(plan, 3)) == all_ahead + "\n"


def test_a_stage_must_be_unsharded_to_compute() -> None:
    with pytest.raises(PlanError, match=r"max_unsharded=0.*expected at least 1"):
        add_unshard_reshard(get_schedule("1f1b")(2, 2), 0)


@given(plans().filter(lambda plan: plan.has_backward))
def test_reduction(plan: Plan) -> None:
    reduced = add_reduce_grad(plan)
    check(reduced)
    for rank, codes in enumerate(reduced.codes):
        for stage in plan.placement.stages_of(rank):
            at = codes.index(key_of(Op.REDUCE_GRAD, stage))
            (before,) = (part for part in parts(codes[at - 1]) if part >> STAGE_SHIFT & STAGE == stage)
            assert before & OP in (Op.W, Op.B)  # right after the last backward


def test_reduction_of_an_evaluation_is_nothing() -> None:
    plan = get_schedule("forward")(2, 3)
    assert add_reduce_grad(plan) == plan


@given(plans())
def test_merging(plan: Plan) -> None:
    merged = merge_backward(plan)
    check(merged)
    for codes in merged.codes:
        assert not any(a & OP == Op.I and b == with_op(a, Op.W) for a, b in pairwise(codes))
    assert merge_backward(merged) == merged


@given(plans(), st.tuples(*[st.floats(0.1, 5)] * 3))
def test_a_free_merge_delays_nobody(plan: Plan, times: tuple[float, float, float]) -> None:
    costs = Costs.per_rank(
        num_stages=plan.num_stages, forward=times[0], backward_input=times[1], backward_weight=times[2]
    )
    merged = merge_backward(plan, everywhere=False)
    check(merged)
    assert simulate(merged, costs).makespan == pytest.approx(simulate(plan, costs).makespan)


def test_lowering_keeps_the_bubble_of_zbv_at_nothing() -> None:
    """Merged everywhere, the gradient would leave after the weight work, and the schedule would be worth nothing."""
    plan = get_schedule("zbv")(4, 12)
    assert simulate(lower(plan)).bubble_longest_rank == pytest.approx(0, abs=1e-12)
    assert simulate(merge_backward(plan)).bubble_longest_rank > 0.05
    assert "0B0" in dumps(lower(plan))


@settings(max_examples=120)
@given(sized(), st.sampled_from(POLICIES), st.booleans(), st.integers(1, 3))
def test_one_rank_alone_gives_what_all_together_give(
    case: tuple[Recipe, int, int, int, StageGraph], policy: ReceivePolicy, tended: bool, limit: int
) -> None:
    recipe, ranks, microbatches, stages_per_rank, graph = case
    plan = recipe(ranks, microbatches, stages_per_rank=stages_per_rank, graph=graph)
    lowered = lower(plan, receives=policy, shards=tended, max_unsharded=limit, reduce=tended and plan.has_backward)
    check(lowered)
    care = Care(tended, limit, tended and plan.has_backward)
    for rank in range(ranks):
        assert lower_shares(plan, receives=policy, care=care).codes[rank] == lowered.codes[rank]


@pytest.mark.parametrize("name", ["interleavedzerobubble", "zbv", "dualpipev"])
def test_one_rank_of_a_thousand_alone(name: str) -> None:
    """It takes no memory for the other ranks; benchmarks/planning.py measures the time."""
    recipe = get_schedule(name)
    assert len(lower_shares(recipe(1024, 4096)).codes[511]) >= 4 * 4096

    def peak(num_ranks: int) -> int:
        tracemalloc.start()
        assert lower_shares(recipe(num_ranks, 256)).codes[num_ranks // 2]
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(1024) < 3 * peak(32)
