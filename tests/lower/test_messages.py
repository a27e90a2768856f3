"""Sends and receives: every policy is proved by the check, and each does what it says."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import IncompleteError, PlanError
from penstock.lower import Ahead, Early, JustInTime, ReceivePolicy, add_messages, lower
from penstock.plan import Action, Placement, Plan, StageGraph, check, dumps, loads, parse
from penstock.plan.actions import OP, partner_of, text
from penstock.plan.ops import COMPUTES, MESSAGES, RECEIVES, SENDS
from penstock.schedules import get_schedule
from penstock.simulate import Costs, simulate
from tests.plans import POLICIES, plans


def lines(plan: Plan) -> list[str]:
    return [" ".join(map(text, codes)) for codes in plan.codes]


@pytest.mark.parametrize(
    ("policy", "drawn"),
    [
        (
            Early(),
            [
                "0F0 0RECV_B0 0SEND_F0 0F1 0RECV_B1 0SEND_F1 0B0 0F2 0RECV_B2 0SEND_F2 0B1 0B2",
                "1RECV_F0 1RECV_F1 1F0 1B0 1RECV_F2 1SEND_B0 1F1 1B1 1SEND_B1 1F2 1B2 1SEND_B2",
            ],
        ),
        (
            Ahead(1),
            [
                "0F0 0RECV_B0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0B0 0F2 0SEND_F2 0RECV_B2 0B1 0B2",
                "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1RECV_F2 1F1 1B1 1SEND_B1 1F2 1B2 1SEND_B2",
            ],
        ),
        (
            JustInTime(),
            [
                "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2",
                "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2",
            ],
        ),
    ],
)
def test_policies_drawn(policy: ReceivePolicy, drawn: list[str]) -> None:
    assert lines(add_messages(get_schedule("1f1b")(2, 3), policy)) == drawn


@settings(max_examples=150)
@given(plans(), st.sampled_from(POLICIES))
def test_every_policy_is_proved(plan: Plan, policy: ReceivePolicy) -> None:
    before = plan.codes
    lowered = add_messages(plan, policy)
    check(lowered)
    assert plan.codes is before  # pure
    assert not plan.is_lowered
    computes = [[code for code in codes if code & OP not in MESSAGES] for codes in lowered.codes]
    assert computes == [[*codes] for codes in plan.codes]  # nothing but messages is added
    assert loads(dumps(lowered), graph=plan.graph, name=plan.name) == lowered
    simulate(lowered)


@settings(max_examples=150)
@given(plans())
def test_early_holds_with_blocking_sends(plan: Plan) -> None:
    check(add_messages(plan, Early()), sends="blocking")


@given(plans(max_ranks=4, max_microbatches=6))
def test_each_message_has_both_ends_once(plan: Plan) -> None:
    lowered = add_messages(plan)
    sends = Counter(code for codes in lowered.codes for code in codes if code & OP in SENDS)
    receives = Counter(code for codes in lowered.codes for code in codes if code & OP in RECEIVES)
    assert Counter(map(partner_of, sends)) == receives
    assert set(sends.values()) <= {1}


@settings(max_examples=100)
@given(plans(), st.tuples(*[st.floats(0.1, 5)] * 3), st.floats(0, 2))
def test_early_receives_cost_no_time(plan: Plan, times: tuple[float, float, float], latency: float) -> None:
    """A lowered plan takes as long as one in which values cross by magic."""
    costs = Costs.per_rank(
        num_stages=plan.num_stages,
        forward=times[0],
        backward_input=times[1],
        backward_weight=times[2],
        latency=latency,
    )
    assert simulate(lower(plan), costs).makespan == pytest.approx(simulate(plan, costs).makespan)


def open_receives(plan: Plan) -> int:
    """The most receives of one channel that are posted and not used yet, over all ranks."""
    most = 0
    for rank in range(plan.num_ranks):
        posted: Counter[int] = Counter()
        users = {need: 0 for code in plan.codes[rank] if code & OP in COMPUTES for need in needs(plan, code)}
        for code in plan.codes[rank]:
            if code & OP in RECEIVES:
                posted[code & OP] += 1
                most = max(most, *posted.values())
            elif code & OP in COMPUTES:
                for need in needs(plan, code):
                    if not users[need]:
                        posted[need & OP] -= 1
                    users[need] += 1
    return most


def needs(plan: Plan, code: int) -> list[int]:
    action = parse(text(code))
    assert isinstance(action, Action)
    return [need.code for need in plan.rules.requires(action) if need.op in RECEIVES]


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "zb-h2"])
def test_ahead_bounds_what_is_posted(name: str) -> None:
    plan = get_schedule(name)(4, 24)
    assert open_receives(add_messages(plan, JustInTime())) == 1
    for count in (1, 2, 3):
        assert open_receives(add_messages(plan, Ahead(count))) <= count + 1
    assert open_receives(add_messages(plan, Early())) <= (24 if name == "gpipe" else 8)


def test_a_rank_that_sends_twice_in_one_slot() -> None:
    """Skip connections: to two ranks, and gradients that several stages of a rank make together."""
    graph = StageGraph.chain(4, [(0, 2), (0, 3)])
    plan = Plan.of([["0F0", "0B0"], ["1F0", "1B0"], ["2F0", "3F0", "3B0", "2B0"]], graph=graph)
    lowered = add_messages(plan, JustInTime())
    assert lines(lowered) == [
        "0F0 0SEND_F0 0SEND_F0>2 0RECV_B0 0RECV_B0<2 0B0",
        "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0",
        "2RECV_F0<0 2RECV_F0 2F0 3F0 3B0 2B0 2SEND_B0>0 2SEND_B0",
    ]
    check(lowered)


def test_two_neighbouring_stages_on_one_rank_need_no_message() -> None:
    plan = lower(get_schedule("interleaved1f1b")(1, 4, stages_per_rank=3))
    assert not plan.is_lowered
    turn = lower(get_schedule("zbv")(2, 2))  # stages 1 and 2 are both on rank 1
    assert "1SEND_F0" not in dumps(turn)
    assert "2RECV_F0" not in dumps(turn)
    assert "2SEND_F0" in dumps(turn)


def test_what_cannot_be_lowered() -> None:
    plan = get_schedule("1f1b")(2, 2)
    with pytest.raises(PlanError, match="holds its messages already"):
        add_messages(add_messages(plan))
    with pytest.raises(IncompleteError, match="rank 1 lacks 1F1; expected a whole plan"):
        add_messages(plan.with_codes([plan.codes[0], plan.codes[1][:2]]))
    with pytest.raises(PlanError, match=r"Ahead\(-1\)"):
        Ahead(-1)


@given(plans(max_ranks=5), st.sampled_from(POLICIES))
def test_evaluation_plans(plan: Plan, policy: ReceivePolicy) -> None:
    """Forward only, then lowered; and lowered, then forward only."""
    check(lower(plan.forward_only(), receives=policy))
    evaluation = lower(plan, receives=policy, shards=True, reduce=plan.has_backward).forward_only()
    check(evaluation)
    assert not evaluation.has_backward
    assert "B" not in dumps(evaluation).replace("OVERLAP_F_B", "")


def test_custom_placements() -> None:
    placement = Placement.of([1, 0, 0, 2, 1])
    rows: dict[int, list[str]] = {0: [], 1: [], 2: []}
    for kind, stages in (("F", range(5)), ("B", reversed(range(5)))):
        for stage in stages:
            rows[placement.rank_of(stage)] += [f"{stage}{kind}{microbatch}" for microbatch in range(3)]
    plan = Plan.of(rows)
    assert plan.placement == placement
    for policy in POLICIES:
        check(add_messages(plan, policy))
    check(add_messages(plan), sends="blocking")
