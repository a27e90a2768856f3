"""Messages for ranks that have one queue for all of them: every list follows one order of all messages.

If messages of several peers share a queue (see `penstock.plan.check_communicators`), a receive that is posted ahead delays the
sends behind it, and ranks may wait for one another in a circle. Here all computing is laid on one clock (a forward takes
one unit, a backward two, each of its halves one). A message happens when the action that makes it ends, on both ends; a
list holds its actions and messages in the order of that clock.

Proof that nothing can wait in a circle, whatever the real times are: order all that happens by the clock. Each list is a
part of this one order, a message has the same place in it on both its ends, and an action comes after all messages that it
needs. So the first thing in this order that has not happened can happen: it is the first of what is left on its rank, or
on both its ranks. This holds for queues of every layout, and with blocking sends.
"""

from __future__ import annotations

from functools import cache

from penstock.checks import check_types
from penstock.errors import PlanError
from penstock.lower.message_pass import rules_with_messages
from penstock.plan import Plan, Rules
from penstock.plan.actions import KEY, partner_of, stage_of
from penstock.simulate import Costs, Timeline, simulate

_UNITS = 3.0  # of an overlapped pair, whose halves end together


def add_messages_in_one_order(plan: Plan) -> Plan:
    """The plan with its sends and receives, right for queues of every layout.

    >>> from penstock.schedules import get_schedule
    >>> print(*add_messages_in_one_order(get_schedule("1f1b")(2, 2)).lines(), sep="\\n")
    rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    rank 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1
    """
    check_types("add_messages_in_one_order", PlanError, plan=(plan, Plan))
    rules = rules_with_messages(plan)
    one, none = (1.0,) * plan.num_stages, (0.0,) * plan.num_stages
    clock = simulate(plan, Costs(one, one, one, none, none, copy=none, overlap=_UNITS))
    lists = []
    for rank, messages in enumerate(_messages(clock, rules)):
        # Of what has one time, messages come first: an action may need them.
        actions = ((start, 1, number, code) for number, (code, start, _) in enumerate(clock.timed(rank)))
        lists.append([code for *_, code in sorted([*messages, *actions])])
    return plan.with_codes(lists)


def _messages(clock: Timeline, rules: Rules) -> list[list[tuple[float, int, int, int]]]:
    """By rank: its messages with their time, and a number that decides between those of one time on both ends."""
    rank_of, sends_of, ends = clock.plan.placement.rank_of, cache(rules.sends), clock.given()
    done = {
        send | code & ~KEY: max(ends[need | code & ~KEY] for need in rules.needs(send))
        for code in ends
        for send in sends_of(code & KEY)
    }
    sends = sorted((when, rank_of(stage_of(send)), send) for send, when in done.items())
    found: list[list[tuple[float, int, int, int]]] = [[] for _ in clock.plan.codes]
    for number, (when, rank, send) in enumerate(sends):
        receive = partner_of(send)
        found[rank].append((when, 0, number, send))
        found[rank_of(stage_of(receive))].append((when, 0, number, receive))
    return found
