"""Queues that messages share: what deadlocks on an accelerator's communicator is refused, with the circle shown."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.compat._orders import add_send_recv, named, packed
from penstock.errors import DeadlockError
from penstock.lower import lower
from penstock.plan import Plan, check
from penstock.plan.check_communicators import QueueLayout, check_queues
from penstock.schedules import get_schedule
from tests.plans import RECIPES, plans

LAYOUTS: tuple[QueueLayout, ...] = ("direction", "pair", "one")


def crossed(first: str, second: str) -> Plan:
    """Two ranks, two microbatches; what rank 0 posts between its second forward and its first backward is given."""
    return Plan.of(
        {
            0: ["0F0", "0SEND_F0", "0F1", first, second, "0B0", "0RECV_B1", "0B1"],
            1: ["1RECV_F0", "1F0", "1B0", "1RECV_F1", "1SEND_B0", "1F1", "1B1", "1SEND_B1"],
        }
    )


@pytest.mark.parametrize("layout", ["pair", "one"])
def test_a_receive_that_is_posted_before_a_send_holds_it_up(layout: QueueLayout) -> None:
    check(crossed("0RECV_B0", "0SEND_F1"))
    check(crossed("0SEND_F1", "0RECV_B0"), queues=layout)
    with pytest.raises(DeadlockError) as caught:
        check(crossed("0RECV_B0", "0SEND_F1"), queues=layout)
    assert str(caught.value).splitlines()[1:] == [
        "  rank  stopped at              waits for     held up by",
        "     0  0B0 (position 6)        0RECV_B0      1RECV_F1 before it on rank 1",
        "     1  1F1 (position 6)        1RECV_F1      0RECV_B0 before it on rank 0",
    ]


@pytest.mark.parametrize("layout", ["pair", "one"])
def test_messages_side_by_side_pass_each_other_in_a_batch(layout: QueueLayout) -> None:
    check(crossed("0RECV_B0", "0SEND_F1"), queues=layout, batches=True)


def test_peers_hold_one_another_up_on_one_queue_only() -> None:
    """Rank 1 posts a receive from rank 2 ahead of its send to rank 0, which rank 0 needs for rank 2's gradient to come."""
    plan = Plan.of(
        {
            0: ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"],
            1: [
                "1RECV_F0",
                "1F0",
                "1SEND_F0",
                "1RECV_B0",
                "1RECV_F1",
                "1F1",
                "1SEND_F1",
                "1B0",
                "1SEND_B0",
                "1RECV_B1",
                "1B1",
                "1SEND_B1",
            ],
            2: ["2RECV_F0", "2F0", "2RECV_F1", "2F1", "2B0", "2SEND_B0", "2B1", "2SEND_B1"],
        }
    )
    check(plan)
    for layout in ("pair", "one"):
        with pytest.raises(DeadlockError, match="1RECV_B0 before it on rank 1"):
            check(plan, queues=layout)


@pytest.mark.parametrize("name", ["1f1b", "interleaved1f1b", "interleavedzerobubble", "zbv", "dualpipev"])
def test_receives_posted_ahead_deadlock_on_one_queue(name: str) -> None:
    """What ran on an accelerator with one communicator for a group, and stopped for ever: four ranks, eight microbatches."""
    plan = lower(get_schedule(name)(4, 8))
    check(plan)
    with pytest.raises(DeadlockError, match="deadlocks when messages queue by 'one'"):
        check(plan, queues="one")


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "forward"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_messages_in_turn_run_on_every_layout(name: str, layout: QueueLayout) -> None:
    """The order of torch.distributed.pipelining, which is known to run on NCCL."""
    plan = get_schedule(name)(4, 8)
    rows = add_send_recv(dict(enumerate(map(named, plan.codes))), plan.placement.rank_of, plan.num_stages)
    check(plan.with_codes(packed(rows[rank]) for rank in range(4)), queues=layout, sends="blocking")


@settings(max_examples=80)
@given(plans(max_ranks=5, max_microbatches=6), st.booleans())
def test_a_queue_for_each_direction_says_what_the_check_says(plan: Plan, blocking: bool) -> None:
    """Two ways to the same answer: the check without a model of queues, and the model with a queue for each direction."""
    lowered = lower(plan)
    check(lowered, sends="blocking" if blocking else "asynchronous")
    check_queues(lowered, "direction", blocking=blocking)


def test_the_model_stops_where_the_check_does() -> None:
    """Both ranks stay in a send until the other receives."""
    plan = Plan.of(
        {
            0: ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"],
            1: ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1"],
        }
    )
    check_queues(plan, "direction")
    for run in (lambda: check(plan, sends="blocking"), lambda: check_queues(plan, "direction", blocking=True)):
        with pytest.raises(DeadlockError):
            run()
