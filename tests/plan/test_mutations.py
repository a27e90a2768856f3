"""A good lowered plan, spoilt: the check says so, or the plan really runs to its end."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.lower import lower
from penstock.plan import Op, Plan, check
from penstock.plan.actions import OP
from penstock.simulate import simulate
from tests.plans import POLICIES, plans


@st.composite
def lowered(draw: st.DrawFn) -> Plan:
    plan = draw(plans(max_ranks=4, max_microbatches=4))
    sharded, reduced = draw(st.booleans()), draw(st.booleans()) and plan.has_backward
    return lower(plan, receives=draw(st.sampled_from(POLICIES)), shards=sharded, max_unsharded=2, reduce=reduced)


def accepted(plan: Plan) -> bool:
    try:
        check(plan)
    except PlanError:
        return False
    return True


def runs(plan: Plan) -> bool:
    """Every action gets its time, and no time is before what it needs."""
    timeline = simulate(plan)
    return all(len(starts) == len(codes) for starts, codes in zip(timeline.starts, plan.codes, strict=True))


def with_row(plan: Plan, rank: int, row: list[int]) -> Plan:
    return plan.with_codes([row if r == rank else codes for r, codes in enumerate(plan.codes)])


@st.composite
def a_rank_and_positions(draw: st.DrawFn, plan: Plan) -> tuple[int, int, int]:
    rank = draw(st.integers(0, plan.num_ranks - 1))
    place = st.integers(0, len(plan.codes[rank]) - 1)
    return rank, draw(place), draw(place)


@settings(max_examples=200)
@given(lowered(), st.data())
def test_two_actions_swapped(plan: Plan, data: st.DataObject) -> None:
    rank, one, other = data.draw(a_rank_and_positions(plan))
    row = [*plan.codes[rank]]
    row[one], row[other] = row[other], row[one]
    spoilt = with_row(plan, rank, row)
    assert not accepted(spoilt) or runs(spoilt)


@settings(max_examples=100)
@given(lowered(), st.data())
def test_an_action_moved(plan: Plan, data: st.DataObject) -> None:
    rank, one, other = data.draw(a_rank_and_positions(plan))
    row = [*plan.codes[rank]]
    row.insert(other, row.pop(one))
    spoilt = with_row(plan, rank, row)
    assert not accepted(spoilt) or runs(spoilt)


@settings(max_examples=100)
@given(lowered(), st.data())
def test_an_action_dropped(plan: Plan, data: st.DataObject) -> None:
    rank, one, _ = data.draw(a_rank_and_positions(plan))
    row = [*plan.codes[rank]]
    dropped = row.pop(one)
    spoilt = with_row(plan, rank, row)
    # A plan that never reduces is right too, and so is an evaluation.
    if dropped & OP == Op.REDUCE_GRAD or plan.has_backward != spoilt.has_backward:
        assert not accepted(spoilt) or runs(spoilt)
    else:
        assert not accepted(spoilt)


@settings(max_examples=100)
@given(lowered(), st.data())
def test_an_action_doubled(plan: Plan, data: st.DataObject) -> None:
    rank, one, other = data.draw(a_rank_and_positions(plan))
    row = [*plan.codes[rank]]
    row.insert(other, row[one])
    assert not accepted(with_row(plan, rank, row))


@settings(max_examples=100)
@given(lowered(), st.data())
def test_an_action_moved_to_another_rank(plan: Plan, data: st.DataObject) -> None:
    rank, one, _ = data.draw(a_rank_and_positions(plan))
    to = data.draw(st.integers(0, plan.num_ranks - 1).filter(lambda r: r != rank or plan.num_ranks == 1))
    rows = [[*codes] for codes in plan.codes]
    rows[to].insert(0, rows[rank].pop(one))
    assert to == rank or not accepted(plan.with_codes(rows))


@settings(max_examples=150)
@given(lowered(), st.randoms(use_true_random=False))
def test_what_the_check_accepts_runs_and_what_it_calls_a_deadlock_does_not(plan: Plan, random: object) -> None:
    """Rows shuffled a little: the check and the simulator agree wherever the messages keep their order."""
    rows = [[*codes] for codes in plan.codes]
    for row in rows:
        for _ in range(2):
            at = random.randrange(len(row))  # type: ignore[attr-defined]
            row[at : at + 2] = row[at : at + 2][::-1]
    shuffled = plan.with_codes(rows)
    assert [Counter(row) for row in rows] == [Counter(codes) for codes in plan.codes]
    if accepted(shuffled):
        assert runs(shuffled)
