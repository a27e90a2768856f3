"""Messages in the order in which torch.distributed.pipelining puts them into its lists.

The ranks take turns, one action each; a send follows its action at once, and its receive is appended, at that very
moment, to the list of the rank at the other end. So all lists together follow one sequence in which no receive comes
before its send, and receives may even block. `Early` (see messages.py) posts receives sooner; this order is what
existing programs load, save and compare.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

from penstock.errors import OrderError
from penstock.plan.actions import MICROBATCH_FIELD, OP, STAGE, STAGE_SHIFT, Op, key_of, partner_of, parts, peer_of, text

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
    return _Turns(codes, rank_of, num_stages).run()


class _Turns:
    """Rounds of turns. A rank that waits is woken by what it waits for, in this round if its turn is still to come."""

    def __init__(self, codes: Mapping[int, Sequence[int | None]], rank_of: RankOf, num_stages: int) -> None:
        self.codes, self.rank_of, self.last = codes, rank_of, num_stages - 1
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
            need = self.need(part)
            if need is not None and need not in self.there[rank]:
                self.waiting[rank] = need
                return
        self.at[rank] += 1
        if self.at[rank] < len(self.codes[rank]):
            heapq.heappush(self.later, rank)
        if code is not None:
            self.lists[rank].append(code)
        for part in actions:
            self.done(rank, part)

    def need(self, code: int) -> int | None:
        """The message that brings this action's input, whether it comes from another rank or is at hand."""
        op, stage = code & OP, code >> STAGE_SHIFT & STAGE
        if op == Op.F and stage > 0:
            return key_of(Op.RECV_F, stage) | code & MICROBATCH_FIELD
        if op in (Op.I, Op.B) and stage < self.last:
            return key_of(Op.RECV_B, stage) | code & MICROBATCH_FIELD
        return None

    def done(self, rank: int, code: int) -> None:
        """Send what the action gives, or leave it at hand for the next stage."""
        op, stage = code & OP, code >> STAGE_SHIFT & STAGE
        if op == Op.F and stage < self.last:
            send = key_of(Op.SEND_F, stage) | code & MICROBATCH_FIELD
        elif op in (Op.I, Op.B) and stage > 0:
            send = key_of(Op.SEND_B, stage) | code & MICROBATCH_FIELD
        else:
            return
        receive = partner_of(send)
        there = self.rank_of(receive >> STAGE_SHIFT & STAGE)
        if there != rank:
            self.lists[rank].append(send)
            self.lists[there].append(receive)
        self.there[there].add(receive)
        if self.waiting.get(there) == receive:
            del self.waiting[there]
            heapq.heappush(self.now if there > rank else self.later, there)


def defer_receives(codes: Mapping[int, Sequence[int]], rank_of: RankOf) -> dict[int, list[int]]:
    """Move each receive down to the action that uses it; the lower of two ranks still receives before it sends."""
    return {rank: _deferred(rank, row, rank_of) for rank, row in codes.items()}


def _deferred(rank: int, row: Sequence[int], rank_of: RankOf) -> list[int]:
    held: dict[int, None] = {}  # in order
    lowered: list[int] = []
    for code in row:
        op = code & OP
        if op in (Op.RECV_F, Op.RECV_B):
            held[code] = None
            continue
        if op in (Op.SEND_F, Op.SEND_B) and rank < (peer := rank_of(peer_of(code))):
            due = [receive for receive in held if rank_of(peer_of(receive)) == peer]
        else:
            due = [receive for part in parts(code) if (receive := _input_of(part)) in held]
        for receive in due:
            del held[receive]
        lowered += (*due, code)
    if held:
        unused = text(next(iter(held)))
        raise OrderError(f"rank {rank} receives {unused} and never uses it; expected a forward or backward for it")
    return lowered


def _input_of(code: int) -> int:
    """The receive that a compute action would use; -1 for what uses none."""
    op, stage = code & OP, code >> STAGE_SHIFT & STAGE
    if op == Op.F:
        return key_of(Op.RECV_F, stage) | code & MICROBATCH_FIELD if stage else -1
    if op in (Op.I, Op.B):
        return key_of(Op.RECV_B, stage) | code & MICROBATCH_FIELD
    return -1
