"""Messages in the order in which torch.distributed.pipelining puts them into its lists.

The ranks take turns, one action each; a send follows its action at once, and its receive is appended, at that very
moment, to the list of the rank at the other end. So all lists together follow one sequence in which no receive comes
before its send, and receives may even block. `penstock.lower.Early` posts receives sooner; this order is what
existing programs load, save and compare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TypeVar

from penstock.errors import OrderError
from penstock.plan import Placement, Rules, StageGraph
from penstock.plan.actions import KEY, MICROBATCH_FIELD, OP, partner_of, parts, peer_of, stage_of, text, with_op
from penstock.plan.ops import INPUT_GRADIENTS, RECEIVES, SENDS, Op

RankOf = Callable[[int], int]
T = TypeVar("T")


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
    rules = chain_rules(rank_of, num_stages)
    arrivals, sends = cache(lambda key: tuple(rules.arrivals(key))), cache(rules.sends)
    lists: dict[int, list[int]] = {rank: [] for rank in codes}
    there: dict[int, set[int]] = {rank: set() for rank in codes}  # what has arrived or was computed, as needs

    def turn(rank: int, code: int | None, _: int) -> bool:
        actions = () if code is None else parts(code)
        for part in actions:
            if any(need | part & MICROBATCH_FIELD not in there[rank] for need in arrivals(part & KEY)):
                return False
        lists[rank] += () if code is None else (code,)
        for part in actions:
            there[rank].add(with_op(part, Op.I) if part & OP in INPUT_GRADIENTS else part)
            for key in sends(part & KEY):
                send = key | part & MICROBATCH_FIELD
                receive = partner_of(send)
                home = rank_of(stage_of(receive))
                lists[rank].append(send)
                lists[home].append(receive)
                there[home].add(receive)
        return True

    if stuck := take_turns(codes, turn):
        rank = min(stuck)
        raise OrderError(
            f"rank {rank} cannot go on at {text(stuck[rank] or 0)}: its input never comes; expected an order in which every "
            "action follows what it needs"
        )
    return lists


def take_turns(
    rows: Mapping[int, Sequence[T]], turn: Callable[[int, T, int], bool], *, chances: int = 1
) -> dict[int, T]:
    """Round by round, each rank in turn tries its next action, `chances` times in a round; `turn(rank, action, round)` does
    it and says whether it could. What the ranks are left with when none can go on comes back: nothing, if all is done.
    """
    at = dict.fromkeys(sorted(rows), 0)
    number = 0
    while left := {rank: rows[rank][place] for rank, place in at.items() if place < len(rows[rank])}:
        acted: set[int] = set()
        for rank in (*left,) * chances:
            if rank not in acted and turn(rank, left[rank], number):
                acted.add(rank)
                at[rank] += 1
        if not acted:
            break
        number += 1
    return left


def defer_receives(codes: Mapping[int, Sequence[int]], rank_of: RankOf) -> dict[int, list[int]]:
    """Move each receive down to the action that uses it; the lower of two ranks still receives before it sends."""
    highest = max(
        (max(stage_of(part), peer_of(part)) for row in codes.values() for c in row for part in parts(c)), default=0
    )
    rules = chain_rules(rank_of, highest + 1)
    return {rank: _deferred(rank, row, rules) for rank, row in codes.items()}


def chain_rules(rank_of: RankOf, num_stages: int) -> Rules:
    """What precedes what in a chain of stages with messages."""
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
