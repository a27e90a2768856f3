"""The simulator: times, costs that differ, messages, idle time by cause, memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import DeadlockError, PlanError
from penstock.lower import JustInTime, ReceivePolicy, lower
from penstock.plan import Plan
from penstock.plan.actions import OP, text
from penstock.plan.ops import MESSAGES
from penstock.schedules import get_schedule
from penstock.simulate import Costs, Timeline, simulate
from tests.plans import POLICIES, plans

TWO = Plan.of([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])


def costs(num_stages: int, **given: object) -> Costs:
    """Costs with some fields changed; a number stands for the same in every stage."""
    ones = (1.0,) * num_stages
    fields: dict[str, object] = dict.fromkeys(
        ("forward", "backward_input", "backward_weight", "held_to_input", "held_to_weight"), ones
    )
    return Costs(**{**fields, **given})  # type: ignore[arg-type]


def times(timeline: Timeline, rank: int) -> dict[str, tuple[float, float]]:
    return {str(span.action): (span.start, span.end) for span in timeline.spans(rank)}


def test_a_small_plan_by_hand() -> None:
    timeline = simulate(TWO, costs(2, forward=(1.0, 2.0), backward_input=(1.0, 3.0), backward_weight=(0.5, 0.0)))
    assert times(timeline, 0) == {"0F0": (0, 1), "0F1": (1, 2), "0B0": (6, 7.5), "0B1": (11, 12.5)}
    assert times(timeline, 1) == {"1F0": (1, 3), "1B0": (3, 6), "1F1": (6, 8), "1B1": (8, 11)}
    assert timeline.makespan == 12.5
    assert timeline.longest_rank == 12.5
    assert timeline.busy == (5, 10)
    assert timeline.bubble_makespan == pytest.approx(1 - 15 / 25)


def test_latency_is_the_same_with_and_without_messages() -> None:
    given = costs(2, latency=0.25)
    for plan in (TWO, lower(TWO)):
        timeline = simulate(plan, given)
        assert times(timeline, 1)["1F0"] == (1.25, 2.25)
        assert times(timeline, 0)["0B0"] == (4.5, 6.5)
        assert timeline.makespan == 9.5


def test_an_overhead_occupies_the_rank_with_every_compute_action() -> None:
    timeline = simulate(TWO, costs(2, overhead=0.25))
    assert times(timeline, 0)["0F0"] == (0, 1.25)
    assert times(timeline, 1)["1B0"] == (2.5, 4.75), "a full backward is one action"
    split = simulate(Plan.of([["0F0", "0I0", "0W0"]]), costs(1, overhead=0.25))
    assert split.makespan == 3.75
    pair = Plan.of([["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]])
    assert simulate(pair, costs(1, overhead=0.25)).makespan == 7
    assert simulate(pair, costs(1, overhead=0.25, overlap=2.0)).makespan == 5.75


def test_posting_occupies_the_rank_and_delays_the_message() -> None:
    plan = Plan.of([["0F0", "0SEND_F0", "0F1", "0SEND_F1"], ["1RECV_F0", "1F0", "1RECV_F1", "1F1"]])
    timeline = simulate(plan, costs(2, posting=0.25, latency=0.5))
    assert times(timeline, 0)["0F1"] == (1.25, 2.25)
    assert times(timeline, 1) == {
        "1RECV_F0": (0, 1.75),
        "1F0": (1.75, 2.75),
        "1RECV_F1": (2.75, 3.5),
        "1F1": (3.5, 4.5),
    }
    assert timeline.makespan == 4.5
    for idle, busy in zip(timeline.idle, timeline.busy, strict=True):
        assert idle.total + busy == timeline.makespan
    assert timeline.idle[0].communication == 0.25, "between the two forwards the rank posts a send"
    assert timeline.idle[0].draining == 2.25


def test_a_bandwidth_makes_messages_wait_for_one_another() -> None:
    """Stage 0 computes in 1 and sends for 2; the second message starts when the first is through."""
    plan = lower(get_schedule("forward")(2, 3))
    timeline = simulate(plan, costs(2, bandwidth=5.0, output_bytes=(10.0, 0.0), latency=0.5))
    assert times(timeline, 1)["1F0"] == (3.5, 4.5)
    assert times(timeline, 1)["1F1"] == (5.5, 6.5)
    assert times(timeline, 1)["1F2"] == (7.5, 8.5)
    arrived = [(str(m.send), str(m.recv), m.posted, m.arrived) for m in timeline.messages()]
    assert arrived == [
        ("0SEND_F0", "1RECV_F0", 1, 3.5),
        ("0SEND_F1", "1RECV_F1", 2, 5.5),
        ("0SEND_F2", "1RECV_F2", 3, 7.5),
    ]


def test_gradients_are_as_large_as_what_they_belong_to() -> None:
    plan = lower(Plan.of([["0F0", "0B0"], ["1F0", "1B0"]]))
    timeline = simulate(plan, costs(2, bandwidth=1.0, output_bytes=(3.0, 100.0)))
    assert timeline.makespan == 1 + 3 + 1 + 2 + 3 + 2


def test_a_receive_that_is_posted_late_delays_its_message() -> None:
    plan = get_schedule("gpipe")(2, 2)
    early, late = (
        simulate(lower(plan), costs(2, latency=1.0)),
        simulate(lower(plan, receives=JustInTime()), costs(2, latency=1.0)),
    )
    assert times(early, 1)["1F1"] == (3, 4)
    assert times(late, 1)["1F1"] == (4, 5)  # posted at 3, when 1F0 was done


def test_full_backwards_and_fused_pairs_have_their_own_times() -> None:
    plan = Plan.of([["0F0", "1F0", "(0F1;1B0)OVERLAP_F_B", "1F1", "0B0", "1B1", "0B1"]])
    assert simulate(plan, costs(2)).makespan == 12
    assert simulate(plan, costs(2, overlap=2.0)).makespan == 11
    assert simulate(plan, costs(2, backward=(1.5, 1.5))).makespan == 10
    assert simulate(plan, costs(2, overlap=2.0, backward=(1.5, 1.5))).makespan == 4 + 2 + 3 * 1.5 - 1


def test_in_a_pair_in_series_the_first_is_there_before_the_second() -> None:
    plan = Plan.of([["0F0", "2F0", "(0F1;2B0)OVERLAP_F_B", "2F1", "2B1", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1B1"]])
    series = simulate(plan, costs(3))
    assert times(series, 0)["(0F1;2B0)OVERLAP_F_B"] == (3, 6)
    assert times(series, 1)["1F1"] == (4, 5)
    assert times(series, 1)["1B0"] == (6, 8)
    fused = simulate(plan, costs(3, overlap=2.0))
    assert times(fused, 1)["1F1"] == (5, 6)


def test_care_of_parameters_takes_the_time_that_it_is_given() -> None:
    plan = lower(Plan.of([["0F0", "0B0"]]), shards=True, reduce=True)
    assert [text(code) for code in plan.codes[0]] == ["0UNSHARD", "0F0", "0B0", "0REDUCE_GRAD", "0RESHARD"]
    timeline = simulate(plan, costs(1, unshard=0.5, reshard=0.25, reduce_grad=2.0))
    assert times(timeline, 0)["0F0"] == (0.5, 1.5)
    assert timeline.makespan == 0.5 + 3 + 2 + 0.25


@settings(max_examples=120)
@given(
    plans(),
    st.sampled_from(POLICIES),
    st.booleans(),
    st.lists(st.floats(0.01, 5), min_size=7, max_size=7),
)
def test_idle_time_adds_up(plan: Plan, policy: ReceivePolicy, is_lowered: bool, numbers: list[float]) -> None:
    """Busy, filling, draining, communication and imbalance together are the makespan, on every rank."""
    stages = plan.num_stages
    given = costs(
        stages,
        forward=tuple(numbers[0] * (1 + stage % 3) for stage in range(stages)),
        backward_input=tuple(numbers[1] * (1 + stage % 2) for stage in range(stages)),
        backward_weight=(numbers[2],) * stages,
        latency=numbers[3],
        bandwidth=numbers[4],
        output_bytes=(numbers[5],) * stages,
        unshard=numbers[6],
        reduce_grad=numbers[6],
    )
    if is_lowered:
        plan = lower(plan, receives=policy, shards=True, reduce=plan.has_backward)
    timeline = simulate(plan, given)
    assert len(timeline.idle) == plan.num_ranks
    for rank, idle in enumerate(timeline.idle):
        assert idle.total + timeline.busy[rank] == pytest.approx(timeline.makespan)
        assert min(idle.filling, idle.draining, idle.communication, idle.imbalance) >= 0
    if not is_lowered:
        assert timeline.bubble_makespan == pytest.approx(
            sum(idle.total for idle in timeline.idle) / (plan.num_ranks * timeline.makespan)
        )


def test_idle_time_by_cause() -> None:
    """Rank 1 waits for 0F0 (filling: 1 + 0.25) and later for 0F1, of which 0.25 is the way."""
    plan = Plan.of([["0F0", "0F1"], ["1F0", "1F1"]])
    rank0, rank1 = simulate(plan, costs(2, forward=(2.0, 1.0), latency=0.25)).idle
    assert (rank0.filling, rank0.draining, rank0.communication, rank0.imbalance) == (0, 1.25, 0, 0)
    assert (rank1.filling, rank1.draining, rank1.communication, rank1.imbalance) == (2.25, 0, 0.25, 0.75)


@settings(max_examples=100)
@given(plans(max_ranks=5, max_microbatches=8), st.sampled_from(POLICIES), st.floats(0, 3), st.floats(0.5, 20))
def test_order_and_needs_are_kept(plan: Plan, policy: ReceivePolicy, latency: float, bandwidth: float) -> None:
    """On each rank one action after another; nothing starts before what it needs is there."""
    lowered = lower(plan, receives=policy)
    given = costs(plan.num_stages, latency=latency, bandwidth=bandwidth, output_bytes=(2.0,) * plan.num_stages)
    timeline = simulate(lowered, given)
    when = {}
    for rank, codes in enumerate(lowered.codes):
        free = 0.0
        for code, start, end in zip(codes, timeline.starts[rank], timeline.ends[rank], strict=True):
            assert start >= free
            assert end >= start
            when[code] = (start, end)
            if code & OP not in MESSAGES:
                free = end
    for message in timeline.messages():
        receive = message.recv.code
        assert message.arrived >= max(message.posted, when[receive][0]) + latency
        assert message.arrived == pytest.approx(when[receive][1])
    assert timeline.makespan >= simulate(lower(plan), given).makespan - 1e-9  # no policy is quicker than Early


@settings(max_examples=80)
@given(plans(max_ranks=5, max_microbatches=8), st.floats(0, 3), st.floats(0.1, 4))
def test_the_bubble_is_never_better_than_the_floor(plan: Plan, latency: float, forward: float) -> None:
    per_rank = plan.num_stages // plan.num_ranks
    given = Costs.per_rank(num_stages=plan.num_stages, stages_per_rank=per_rank, forward=forward, latency=latency)
    for policy in POLICIES:
        timeline = simulate(lower(plan, receives=policy), given)
        work = plan.num_microbatches * (forward + (2 if plan.has_backward else 0))
        floor = work + (plan.num_ranks - 1) * (forward / per_rank + latency)
        assert timeline.makespan >= floor * (1 - 1e-9)
        assert timeline.bubble_makespan >= (1 - work / floor) - 1e-9


def test_memory_of_full_and_split_backwards() -> None:
    """Held from F to I, and a part of it from I to W."""
    whole = Plan.of([["0F0", "0F1", "0B0", "0B1"]])
    given = costs(1, held_to_input=(5.0,), held_to_weight=(2.0,))
    assert simulate(whole, given).memory[0] == [(0, 0), (0, 5), (1, 10), (4, 5), (6, 0)]
    split = Plan.of([["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"]])
    assert simulate(split, given).memory[0] == [(0, 0), (0, 5), (1, 10), (3, 7), (4, 4), (5, 2), (6, 0)]
    assert simulate(split, given).peak_memory == (10,)


@given(plans(max_ranks=5, max_microbatches=8))
def test_nothing_is_held_in_the_end(plan: Plan) -> None:
    timeline = simulate(lower(plan))
    for curve in timeline.memory:
        assert curve[-1][1] == pytest.approx(0)
        assert [time for time, _ in curve] == sorted(time for time, _ in curve)
        assert min(held for _, held in curve) >= -1e-9
    assert max(timeline.peak_memory) <= plan.num_microbatches + 1e-9


def test_evaluation_holds_one_microbatch_at_a_time() -> None:
    assert simulate(get_schedule("1f1b")(4, 8).forward_only()).peak_memory == (1, 1, 1, 1)


def test_unit_costs_are_per_rank() -> None:
    for name, stages in (("1f1b", 1), ("interleaved1f1b", 4), ("zbv", 2)):
        plan = get_schedule(name)(2, 4, stages_per_rank=stages)
        assert sum(simulate(plan).busy) == pytest.approx(2 * 4 * 3)


def test_stages_that_differ() -> None:
    given = Costs.per_stage([1, 2], [3, 4], [5, 6])
    assert given.num_stages == 2
    assert simulate(TWO, given).busy == (2 * 9, 2 * 12)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"forward": (1.0,)}, "costs for different numbers of stages"),
        ({"forward": (1.0, -1.0)}, "expected finite numbers >= 0"),
        ({"forward": (1.0, float("nan"))}, "expected finite numbers >= 0"),
        ({"latency": float("inf")}, "expected finite numbers >= 0"),
        ({"latency": -0.5}, "latency=-0.5"),
        ({"bandwidth": 1.0}, "needs output_bytes"),
        ({"bandwidth": 0.0, "output_bytes": (1.0, 1.0)}, "must be above 0"),
    ],
)
def test_costs_that_cannot_be(fields: dict[str, object], complaint: str) -> None:
    with pytest.raises(PlanError) as caught:
        costs(2, **fields)
    assert complaint in str(caught.value)


def test_what_cannot_be_simulated() -> None:
    with pytest.raises(PlanError, match="costs for 3 stages, a plan for 2"):
        simulate(TWO, costs(3))
    stuck = Plan.of([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1F0", "1B1", "1B0"]])
    with pytest.raises(DeadlockError, match="cannot run to its end: rank 0 at 0B0; rank 1 at 1F1"):
        simulate(stuck)


def test_a_recorded_memory_is_shown_as_it_is() -> None:
    timeline = simulate(TWO)
    recorded = Timeline(TWO, timeline.starts, timeline.ends, recorded_memory=([(0.0, 1.0), (1.0, 7.0)], [(0.0, 3.0)]))
    assert recorded.peak_memory == (7.0, 3.0)
    assert Timeline(TWO, timeline.starts, timeline.ends).peak_memory == ()
