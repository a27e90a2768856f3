"""Orders in lockstep: one slot an action, whatever it costs. The clock of torch.distributed.pipelining's own checks.

    in_lockstep(order, stage_to_rank, num_stages)     # which rank does what in which slot, messages and all
    with_bubbles(order, num_stages)                   # computations only, None where a rank waits

penstock's own clock is `simulate`, which knows costs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from penstock.errors import DeadlockError
from penstock.plan.actions import MICROBATCH_FIELD, OP, STAGE, STAGE_SHIFT, Op, key_of, parts
from penstock.plan.vocabulary import ComputationType as Kind
from penstock.plan.vocabulary import NamedAction, Order, to_code


def in_lockstep(
    pipeline_order: Order, stage_to_rank: Callable[[int], int], num_stages: int
) -> dict[int, list[NamedAction | None]]:
    """Work through a lowered order in lockstep, one slot an action: which rank does what in which slot, None where it waits.

    A rank that waits gets a second chance in the same slot, after all others. penstock's own clock is `penstock.simulate`.
    """
    lockstep = _Lockstep(pipeline_order, stage_to_rank, num_stages - 1)
    while lockstep.left:
        lockstep.slot()
    return lockstep.slots


class _Lockstep:
    """The ranks, one slot after another. A rank that waits is woken by what it waits for."""

    def __init__(self, order: Order, rank_of: Callable[[int], int], last: int) -> None:
        self.rank_of, self.last = rank_of, last
        self.rows = {rank: [action for action in order[rank] if action is not None] for rank in sorted(order)}
        self.at = dict.fromkeys(self.rows, 0)
        self.slots: dict[int, list[NamedAction | None]] = {rank: [] for rank in self.rows}
        self.left = {rank for rank, row in self.rows.items() if row}  # that have something to do
        self.ready: set[int] = set()  # that can do it
        self.done: set[int] = set()
        self.waited: dict[int, int] = {}  # packed action -> the rank that waits for it
        self.time = 0
        for rank in self.left:
            self.look(rank)

    def slot(self) -> None:
        """Each rank in turn, then once more those that others have woken meanwhile."""
        if not self.ready:
            stuck = ", ".join(f"rank {rank} at {self.rows[rank][self.at[rank]]}" for rank in sorted(self.left))
            raise DeadlockError(f"Schedule is not progressing: {stuck} wait for ever")
        acted: set[int] = set()
        for _ in range(2):
            turns = sorted(self.ready - acted)
            while turns:
                rank = heapq.heappop(turns)
                acted.add(rank)
                for woken in self.act(rank):
                    if woken > rank and woken not in acted:
                        heapq.heappush(turns, woken)
        self.time += 1

    def act(self, rank: int) -> list[int]:
        """Do the next action of a rank; the ranks that waited for it."""
        action = self.rows[rank][self.at[rank]]
        self.slots[rank].extend([None] * (self.time - len(self.slots[rank])))
        self.slots[rank].append(action)
        self.ready.remove(rank)
        codes = parts(to_code(action))
        self.done.update(codes)
        self.at[rank] += 1
        woken = [self.waited.pop(code) for code in codes if code in self.waited]
        if self.at[rank] == len(self.rows[rank]):
            self.left.remove(rank)
        else:
            self.look(rank)
        return [other for other in woken if other != rank and self.look(other)]

    def look(self, rank: int) -> bool:
        """Whether a rank can do its next action; if not, it waits for what brings the input."""
        for code in parts(to_code(self.rows[rank][self.at[rank]])):
            needs = [
                key_of(op, stage) | code & MICROBATCH_FIELD
                for op, stage in self.alternatives(code & OP, code >> STAGE_SHIFT & STAGE)
            ]
            if needs and self.done.isdisjoint(needs):
                self.waited.update(dict.fromkeys(needs, rank))
                return False
        self.ready.add(rank)
        return True

    def alternatives(self, op: int, stage: int) -> list[tuple[Op, int]]:
        """What brings an action its input: any one of these. Neighbours on one rank hand over."""
        near = self.rank_of(stage)
        match op:
            case Op.F if stage > 0:
                handed = [(Op.F, stage - 1)] if self.rank_of(stage - 1) == near else []
                return [(Op.RECV_F, stage), *handed]
            case Op.I | Op.B if stage < self.last:
                handed = [(Op.I, stage + 1), (Op.B, stage + 1)] if self.rank_of(stage + 1) == near else []
                return [(Op.RECV_B, stage), *handed]
            case Op.SEND_F:
                return [(Op.F, stage)]
            case Op.SEND_B:
                return [(Op.I, stage), (Op.B, stage)]
            case Op.RECV_F:
                return [(Op.SEND_F, stage - 1)]
            case Op.RECV_B:
                return [(Op.SEND_B, stage + 1)]
            case _:
                return []


def with_bubbles(order: Order, num_stages: int) -> dict[int, list[NamedAction | None]]:
    """Computations slot by slot: an action runs when what it needs was done in an earlier slot, else its rank idles."""
    rows = {rank: list(order[rank]) for rank in sorted(order)}
    at = dict.fromkeys(rows, 0)
    slots: dict[int, list[NamedAction | None]] = {rank: [] for rank in rows}
    done: set[NamedAction] = set()
    while busy := [rank for rank in rows if at[rank] < len(rows[rank])]:
        finished: list[NamedAction] = []
        moved = False
        for rank in busy:
            action = rows[rank][at[rank]]
            if action is None or all(_follows(leaf, done, num_stages - 1) for leaf in action.leaves):
                slots[rank].append(action)
                finished += () if action is None else action.leaves
                at[rank] += 1
                moved = True
            else:
                slots[rank].append(None)
        if not moved:
            stuck = ", ".join(f"rank {rank} at {rows[rank][at[rank]]}" for rank in busy)
            raise DeadlockError(f"the order does not progress: {stuck}")
        done.update(finished)
    return slots


def _follows(action: NamedAction, done: set[NamedAction], last: int) -> bool:
    stage, microbatch = action.stage_index, action.microbatch_index
    match action.computation_type:
        case Kind.FORWARD:
            needs = [NamedAction(stage - 1, Kind.FORWARD, microbatch)] if stage else []
        case Kind.BACKWARD_INPUT | Kind.FULL_BACKWARD if stage == last:
            needs = [NamedAction(stage, Kind.FORWARD, microbatch)]
        case Kind.BACKWARD_INPUT | Kind.FULL_BACKWARD:
            needs = [NamedAction(stage + 1, kind, microbatch) for kind in (Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD)]
        case Kind.BACKWARD_WEIGHT:
            needs = [NamedAction(stage, Kind.BACKWARD_INPUT, microbatch)]
        case _:
            needs = []
    return not needs or not done.isdisjoint(needs)
