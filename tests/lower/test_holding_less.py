"""The passes that make plans hold less: recompute, and offload."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.lower import divide, lower, offload, recompute
from penstock.plan import Op, Plan, check, dumps, loads
from penstock.plan.actions import OP, parts, with_op
from penstock.plan.ops import CHOICES, COPIES
from penstock.schedules import get_schedule
from penstock.search import search
from penstock.simulate import Costs, Timeline, simulate
from tests.plans import plans

TIMES = st.sampled_from([0.5, 1.0, 1.0, 1.0, 2.0])


@st.composite
def training(draw: st.DrawFn) -> Plan:
    plan = draw(plans(max_ranks=4, max_microbatches=6).filter(lambda plan: plan.has_backward))
    return lower(plan) if draw(st.booleans()) else plan


@st.composite
def some(draw: st.DrawFn, plan: Plan) -> dict[int, list[int]] | list[int] | None:
    """All, some stages, or some microbatches of some stages."""
    stages = draw(st.lists(st.integers(0, plan.num_stages - 1), unique=True))
    microbatches = st.lists(st.integers(0, plan.num_microbatches - 1), unique=True)
    return draw(st.sampled_from([None, stages, {stage: draw(microbatches) for stage in stages}]))


@st.composite
def costs_of(draw: st.DrawFn, plan: Plan) -> Costs:
    def each() -> tuple[float, ...]:
        return tuple(draw(st.lists(TIMES, min_size=plan.num_stages, max_size=plan.num_stages)))

    held = each()
    return Costs(
        forward=each(),
        backward_input=each(),
        backward_weight=each(),
        held_to_input=held,
        held_to_weight=held,
        kept_input=tuple(size / 16 for size in held),
        latency=draw(st.sampled_from([0.0, 0.4])),
        microbatches=draw(st.none() | st.tuples(*[TIMES] * plan.num_microbatches)),
        ranks=draw(st.none() | st.tuples(*[TIMES] * plan.num_ranks)),
    )


def without(plan: Plan) -> list[list[int]]:
    return [[code for code in codes if code & OP not in CHOICES] for codes in plan.codes]


def chosen(plan: Plan) -> set[int]:
    return {code for codes in plan.codes for code in codes if code & OP in CHOICES}


@settings(max_examples=150)
@given(st.data())
def test_recompute_adds_nothing_but_itself_right_before_backwards(data: st.DataObject) -> None:
    plan = data.draw(training())
    stages = data.draw(some(plan))
    made = recompute(plan, stages)
    check(made if plan.is_lowered else lower(made))
    assert without(made) == [[*codes] for codes in plan.codes]
    assert loads(dumps(made), graph=plan.graph, name=plan.name) == made
    for codes in made.codes:
        for code, after in pairwise(codes):
            if code & OP == Op.R:
                assert {with_op(code, Op.I), with_op(code, Op.B)} & {*parts(after)}
    if stages is not None:
        wanted = {(stage, m) for stage in stages for m in (stages[stage] if isinstance(stages, dict) else range(99))}
        assert {
            (a.stage, a.microbatch) for r in range(made.num_ranks) for a in made.actions(r) if _is(a, Op.R)
        } <= wanted
    assert recompute(made).codes == recompute(plan).codes  # the rest of them; those that are there stay


def _is(action: object, op: Op) -> bool:
    return getattr(action, "op", None) is op


@settings(max_examples=150)
@given(st.data())
def test_recompute_with_costs_uses_waits_and_keeps_the_limit(data: st.DataObject) -> None:
    plan = data.draw(training())
    costs, factor = data.draw(costs_of(plan)), data.draw(st.sampled_from([None, 1.5, 50.0]))
    plain = simulate(recompute(plan), costs)
    limits = None if factor is None else [factor * peak for peak in plain.peak_memory]
    made = recompute(plan, costs=costs, memory_limit=limits)
    check(made if plan.is_lowered else lower(made))
    assert chosen(made) == chosen(plain.plan)
    assert without(made) == [[*codes] for codes in plan.codes]
    timed = simulate(made, costs)
    assert timed.makespan <= plain.makespan * (1 + 1e-9)
    for peak, before in zip(timed.peak_memory, plain.peak_memory, strict=True):
        assert peak <= before * (factor or 1) * (1 + 1e-9)
    for peak, before in zip(plain.peak_memory, simulate(plan, costs).peak_memory, strict=True):
        assert peak <= before * (1 + 1e-9)


@settings(max_examples=150)
@given(st.data())
def test_offload_adds_nothing_but_copies_that_hold_less(data: st.DataObject) -> None:
    plan = data.draw(training())
    costs = data.draw(costs_of(plan))
    for made in (offload(plan, data.draw(some(plan))), offload(plan, data.draw(some(plan)), costs=costs)):
        check(made if plan.is_lowered else lower(made))
        assert without(made) == [[*codes] for codes in plan.codes]
        assert loads(dumps(made), graph=plan.graph, name=plan.name) == made
    before, after = simulate(plan, costs), simulate(offload(plan, costs=costs), costs)
    assert after.makespan == pytest.approx(before.makespan)
    for peak, held in zip(after.peak_memory, before.peak_memory, strict=True):
        assert peak <= held * (1 + 1e-9)


def test_a_recompute_moves_up_into_a_wait_if_memory_allows() -> None:
    """Rank 1 waits three units for 1F1, and one for 1F2 once the first recompute is out of the way."""
    plan = Plan.of([["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"], ["1F0", "1F1", "1B0", "1F2", "1B1", "1B2"]])
    costs = Costs.per_stage([4, 1], [0.5, 1], [0.5, 1])
    plain = simulate(recompute(plan, [1]), costs)
    assert " ".join(map(str, plain.plan.actions(1))) == "1F0 1F1 1R0 1B0 1F2 1R1 1B1 1R2 1B2"
    assert recompute(plan, [1], costs=costs).codes == plain.plan.codes, "it would hold more"
    roomy = recompute(plan, [1], costs=costs, memory_limit=3)
    assert " ".join(map(str, roomy.actions(1))) == "1F0 1R0 1F1 1B0 1R1 1F2 1B1 1R2 1B2"
    timed = simulate(roomy, costs)
    assert timed.makespan < plain.makespan
    assert max(timed.peak_memory) <= 3


def timed(plan: Plan, costs: Costs) -> Timeline:
    check(lower(plan))
    return simulate(plan, costs)


def test_1f1b_recomputed_holds_one_activation_and_inputs() -> None:
    plan = get_schedule("1f1b")(8, 24)
    costs = replace(Costs.unit(plan), kept_input=(1 / 16,) * 8)
    before, after = simulate(plan, costs), timed(recompute(plan, costs=costs), costs)
    assert (before.makespan, max(before.peak_memory)) == (93, 8)
    assert after.makespan <= 93 + 24
    assert after.peak_memory == tuple(1 + (7 - rank) / 16 for rank in range(8))
    heavy_head = tuple([1.0] * 7 + [2.0])
    uneven = replace(costs, forward=heavy_head, backward_input=heavy_head, backward_weight=heavy_head)
    assert timed(recompute(plan, costs=uneven), uneven).makespan == simulate(plan, uneven).makespan == 165


def test_half_of_a_generalised_interleaved_schedule_offloaded() -> None:
    plan = get_schedule("gis")(8, 24, stages_per_rank=4)
    costs = Costs.unit(plan)
    longest_lived = range(16)  # the first two stages of every rank
    after = timed(offload(plan, longest_lived, costs=costs), costs)
    assert max(after.peak_memory) < max(simulate(get_schedule("1f1b")(8, 24)).peak_memory) / 3
    assert after.makespan == simulate(plan, costs).makespan
    assert after.bubble_makespan < 0.1


def test_copies_that_take_longer_than_there_is_time_for_are_not_made() -> None:
    plan = get_schedule("1f1b")(4, 8)
    slow = replace(Costs.unit(plan), copy=(4.0,) * 4)
    made = offload(plan, costs=slow)
    copied = {a.stage for rank in range(4) for a in made.actions(rank) if a.code & OP in COPIES}
    assert copied == {0, 1}, "only what lives longest has the time"
    assert not chosen(offload(plan, costs=replace(slow, copy=(50.0,) * 4)))


def test_searched_plans_can_hold_less_too() -> None:
    costs = Costs.per_rank(num_stages=4, stages_per_rank=2)
    found = search(2, 4, costs, tries=3).plan
    assert max(timed(recompute(found, costs=costs), costs).peak_memory) < max(simulate(found, costs).peak_memory)


def test_both_on_different_stages() -> None:
    plan = recompute(offload(get_schedule("gpipe")(2, 4), [0]), [1])
    check(lower(plan))
    assert plan.has(Op.O)
    assert plan.has(Op.R)
    assert plan.forward_only().codes == get_schedule("gpipe")(2, 4).forward_only().codes


@pytest.mark.parametrize("make", [recompute, offload])
def test_what_cannot_be_asked_for(make) -> None:
    plan = get_schedule("gpipe")(2, 4)
    with pytest.raises(PlanError, match="stage 2 of a plan with 2; expected 0 to 1"):
        make(plan, [2])
    with pytest.raises(PlanError, match="microbatch 4 of stage 1; expected 0 to 3"):
        make(plan, {1: [4]})
    for odd in ({1: True}, "all", 1, [[0]]):
        with pytest.raises(PlanError, match="expected numbers of stages"):
            make(plan, odd)
    with pytest.raises(PlanError, match="no backward"):
        make(plan.forward_only())
    with pytest.raises(PlanError, match=r"has 0[RO]0 already"):
        make(make(plan), [0])
    with pytest.raises(PlanError, match="memory_limit has 1 numbers for 2 ranks"):
        recompute(plan, costs=Costs.unit(plan), memory_limit=[1.0])


@settings(max_examples=60)
@given(st.data())
def test_a_plan_in_pieces_takes_as_long_and_can_hold_one_piece_at_a_time(data: st.DataObject) -> None:
    plan = data.draw(plans(max_ranks=4, max_microbatches=5).filter(lambda plan: plan.has_backward))
    pieces = data.draw(st.integers(1, 3))
    made = divide(plan, pieces)
    check(lower(made))
    assert (made.num_stages, made.num_ranks) == (pieces * plan.num_stages, plan.num_ranks)
    whole, parts_of_it = Costs.unit(plan), Costs.unit(made)
    before, after = simulate(plan, whole), simulate(made, parts_of_it)
    assert after.makespan <= before.makespan * (1 + 1e-9)  # a message may leave as soon as its piece is done
    assert max(after.peak_memory) <= max(before.peak_memory) * (1 + 1e-9)
    check(lower(recompute(made)))


def test_1f1b_in_pieces_is_recomputed_to_one_piece_and_its_inputs() -> None:
    plan = divide(get_schedule("1f1b")(2, 16), 4)
    costs = replace(Costs.unit(plan), kept_input=(1 / 64,) * plan.num_stages)
    peaks = simulate(recompute(plan), costs).peak_memory
    assert max(peaks) <= 0.25 + 8 / 64  # of two activations before
    assert simulate(plan, costs).peak_memory[0] == 2.0


@pytest.mark.parametrize("change", [recompute, offload, lower])
def test_a_plan_is_divided_before_anything_else(change: Any) -> None:
    with pytest.raises(PlanError, match="expected computing alone"):
        divide(change(get_schedule("gpipe")(2, 4)), 2)
    with pytest.raises(PlanError, match="expected at least 1"):
        divide(get_schedule("gpipe")(2, 4), 0)


@pytest.mark.parametrize("change", [recompute, offload])
@pytest.mark.parametrize("costs", [False, True])
def test_iterators_are_read_once(change: Any, costs: bool) -> None:
    plan = get_schedule("gpipe")(2, 4)
    options = {"costs": Costs.unit(plan)} if costs else {}
    assert change(plan, iter([0, 1]), **options) == change(plan, [0, 1], **options) != plan
    assert change(plan, {0: iter([1, 2])}, **options) == change(plan, {0: [1, 2]}, **options) != plan
    with pytest.raises(PlanError, match="stages 'all'; expected numbers"):
        change(plan, "all", **options)
