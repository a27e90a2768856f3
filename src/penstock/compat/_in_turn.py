"""Messages in the order in which torch.distributed.pipelining puts them into its lists.

The ranks take turns, one action each; a send follows its action at once, and its receive is appended, at that very
moment, to the list of the rank at the other end. So all lists together follow one sequence in which no receive comes
before its send, and receives may even block. `penstock.lower.Early` posts receives sooner; this order is what
existing programs load, save and compare.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

from penstock.errors import OrderError
from penstock.plan import Placement, Rules, StageGraph
from penstock.plan.actions import KEY, MICROBATCH_FIELD, OP, partner_of, parts, peer_of, stage_of, text, with_op
from penstock.plan.ops import INPUT_GRADIENTS, RECEIVES, SENDS, Op

RankOf = Callable[[int], int]


def messages_in_turn(
    codes: Mapping[int, Sequence[int | None]], rank_of: RankOf, num_stages: int
) -> dict[int, list[int]]:
    """The packed lists of all ranks with their messages, for a chain of stages. None is an idle slot: a turn passed up.

    >>> from penstock.plan import Plan
    >>> plan = Plan.of([["0F0", "0B0"], ["1F0", "1B0"]])
    >>> lowered = messages_in_turn(dict(enumerate(plan.codes)), plan.placement.rank_of, 2)
    >>> print(*(" ".join(map(text, lowered[rank])) for rank in lowered), sep="; ")
    0F0 0SEND_F0 0RECV_B0 0B0; 1RECV_F0 1F0 1B0 1SEND_B0
    """
    return _Turns(codes, _rules(rank_of, num_stages)).run()


class _Turns:
    """Rounds of turns. A rank that waits is woken by what it waits for, in this round if its turn is still to come."""

    def __init__(self, codes: Mapping[int, Sequence[int | None]], rules: Rules) -> None:
        self.codes, self.rules = codes, rules
        self.lists: dict[int, list[int]] = {rank: [] for rank in codes}
        self.at = dict.fromkeys(codes, 0)
        self.there: dict[int, set[int]] = {rank: set() for rank in codes}  # what has arrived or was computed, as needs
        self.now = sorted(rank for rank in codes if codes[rank])
        self.later: list[int] = []
        self.waiting: dict[int, int] = {}  # rank -> the need that it waits for

    def run(self) -> dict[int, list[int]]:
        while self.now:
            while self.now:
                self.turn(heapq.heappop(self.now))
            self.now, self.later = sorted(self.later), []
        if self.waiting:
            rank = min(self.waiting)
            raise OrderError(
                f"rank {rank} cannot go on at {text(self.codes[rank][self.at[rank]] or 0)}: its input never comes; expected an "
                "order in which every action follows what it needs"
            )
        return self.lists

    def turn(self, rank: int) -> None:
        code = self.codes[rank][self.at[rank]]
        actions = () if code is None else parts(code)
        for part in actions:
            for need in self.rules.arrivals(part & KEY):
                if need | part & MICROBATCH_FIELD not in self.there[rank]:
                    self.waiting[rank] = need | part & MICROBATCH_FIELD
                    return
        self.at[rank] += 1
        if self.at[rank] < len(self.codes[rank]):
            heapq.heappush(self.later, rank)
        if code is not None:
            self.lists[rank].append(code)
        for part in actions:
            self.done(rank, part)

    def done(self, rank: int, code: int) -> None:
        """Leave what the action gives at hand for stages of this rank, and send it to the others."""
        self.arrived(rank, rank, with_op(code, Op.I) if code & OP in INPUT_GRADIENTS else code)
        for key in self.rules.sends(code & KEY):
            send = key | code & MICROBATCH_FIELD
            receive = partner_of(send)
            there = self.rules.placement.rank_of(stage_of(receive))
            self.lists[rank].append(send)
            self.lists[there].append(receive)
            self.arrived(there, rank, receive)

    def arrived(self, there: int, sender: int, what: int) -> None:
        self.there[there].add(what)
        if self.waiting.get(there) == what:
            del self.waiting[there]
            heapq.heappush(self.now if there > sender else self.later, there)


def defer_receives(codes: Mapping[int, Sequence[int]], rank_of: RankOf) -> dict[int, list[int]]:
    """Move each receive down to the action that uses it; the lower of two ranks still receives before it sends."""
    highest = max(
        (max(stage_of(part), peer_of(part)) for row in codes.values() for c in row for part in parts(c)), default=0
    )
    rules = _rules(rank_of, highest + 1)
    return {rank: _deferred(rank, row, rules) for rank, row in codes.items()}


def _rules(rank_of: RankOf, num_stages: int) -> Rules:
    placement = Placement.of([rank_of(stage) for stage in range(num_stages)])
    return Rules(StageGraph.chain(num_stages), placement, lowered=True)


def _deferred(rank: int, row: Sequence[int], rules: Rules) -> list[int]:
    rank_of = rules.placement.rank_of
    held: dict[int, None] = {}  # in order
    lowered: list[int] = []
    for code in row:
        if code & OP in RECEIVES:
            held[code] = None
            continue
        if code & OP in SENDS and rank < (peer := rank_of(peer_of(code))):
            due = [receive for receive in held if rank_of(peer_of(receive)) == peer]
        else:
            needs = (need | part & MICROBATCH_FIELD for part in parts(code) for need in rules.arrivals(part & KEY))
            due = [need for need in needs if need in held]
        for receive in due:
            del held[receive]
        lowered += (*due, code)
    if held:
        unused = text(next(iter(held)))
        raise OrderError(f"rank {rank} receives {unused} and never uses it; expected a forward or backward for it")
    return lowered
