"""Messages for ranks that have one queue for all of them: every list follows one order of all messages.

Where messages of several peers share a queue (see `penstock.plan.queues`), a receive that is posted ahead holds up the
sends behind it, and ranks may wait for one another in a circle. Here all computing is laid on one clock (a forward takes
one unit, a backward two, each of its halves one). A message happens when the action that makes it ends, on both ends; a
list holds its actions and messages in the order of that clock.

Proof that nothing can wait in a circle, whatever the real times are: order all that happens by the clock. Each list is a
part of this one order, a message has the same place in it on both its ends, and an action comes after all messages that it
needs. So the first thing in this order that has not happened can happen: it is the first of what is left on its rank, or
on both its ranks. This holds for queues of every layout, and with blocking sends.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import IncompleteError, PlanError
from penstock.misfits import takes
from penstock.plan import Plan, Rules
from penstock.plan.actions import KEY, OP, partner_of, parts, stage_of, text, with_op
from penstock.plan.ops import COMPUTES, INPUT_GRADIENTS, ROWS, Op


@takes(PlanError)
def add_messages_in_one_order(plan: Plan) -> Plan:
    """The plan with its sends and receives, right for queues of every layout.

    >>> from penstock.schedules import get_schedule
    >>> print(*add_messages_in_one_order(get_schedule("1f1b")(2, 2)).lines(), sep="\\n")
    rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    rank 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1
    """
    if plan.is_lowered:
        raise PlanError("the plan holds its messages already; expected compute actions only")
    return plan.with_codes(_Clock(plan).lists())


class _Clock:
    """When every action starts and ends, if each takes its units and messages take no time."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.starts: list[list[int]] = [[] for _ in plan.codes]
        self.ends: dict[int, int] = {}  # by packed F and I, a B counting as an I: when it ends

    def lists(self) -> Iterator[list[int]]:
        self.run()
        messages = self.messages()
        for codes, starts, ours in zip(self.plan.codes, self.starts, messages, strict=True):
            # Of what has one time, messages come first: an action may need them.
            actions = [(start, 1, number, code) for number, (start, code) in enumerate(zip(starts, codes, strict=True))]
            yield [code for *_, code in sorted([*ours, *actions])]

    def run(self) -> None:
        moved = True
        while moved:
            moved = False
            for rank in range(self.plan.num_ranks):
                moved |= self.advance(rank)
        for rank, codes in enumerate(self.plan.codes):
            if len(self.starts[rank]) < len(codes):
                stopped = text(codes[len(self.starts[rank])])
                raise IncompleteError(f"rank {rank} cannot get to {stopped}; expected a plan that check accepts")

    def advance(self, rank: int) -> bool:
        """Place as many actions of a rank as can be placed; whether it was any."""
        codes, starts = self.plan.codes[rank], self.starts[rank]
        before = len(starts)
        now = starts[-1] + self.units(codes[before - 1]) if starts else 0
        for code in codes[before:]:
            needed = [self.ends.get(need) for part in parts(code) for need in self.needs(part)]
            if None in needed:
                break
            start = max([now, *(end for end in needed if end is not None)])
            starts.append(start)
            now = start + self.units(code)
            for part in parts(code):
                self.ends[self.name(part)] = now
        return len(starts) > before

    @staticmethod
    def units(code: int) -> int:
        return sum(len(ROWS[part & OP].halves) or 1 for part in parts(code) if part & OP in COMPUTES)

    @staticmethod
    def name(code: int) -> int:
        return with_op(code, Op.I) if code & OP in INPUT_GRADIENTS else code

    def needs(self, code: int) -> Iterator[int]:
        """The packed actions of other stages that an action needs."""
        for need in self.plan.rules.arrivals(code & KEY):
            yield need | code & ~KEY

    def messages(self) -> list[list[tuple[int, int, int, int]]]:
        """By rank: its messages with their time, and a number that decides between those of one time on both ends."""
        rules = Rules(self.plan.graph, self.plan.placement, lowered=True)
        rank_of = self.plan.placement.rank_of
        done: dict[int, int] = {}
        for code, end in self.ends.items():
            for send in rules.sends(code & KEY):
                ends = [self.ends[need | code & ~KEY] for need in rules.needs(send)]
                done[send | code & ~KEY] = max(end, *ends)
        sends = sorted((when, rank_of(stage_of(send)), send) for send, when in done.items())
        found: list[list[tuple[int, int, int, int]]] = [[] for _ in self.plan.codes]
        for number, (when, rank, send) in enumerate(sends):
            receive = partner_of(send)
            found[rank].append((when, 0, number, send))
            found[rank_of(stage_of(receive))].append((when, 0, number, receive))
        return found
