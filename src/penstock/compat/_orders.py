"""Passes over orders: dictionaries from rank to lists of named actions, in which None is an idle slot."""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import DeadlockError
from penstock.lower.in_turn import defer_receives, messages_in_turn
from penstock.lower.merge import merge
from penstock.lower.reduce import reduce_grad
from penstock.lower.shards import unshard_reshard
from penstock.plan.actions import MICROBATCH_FIELD, OP, STAGE, STAGE_SHIFT, Op, key_of, parts
from penstock.plan.vocabulary import NamedAction, codes_of, of_code, slots_of, to_code

Actions = Sequence[NamedAction | None]
Order = Mapping[int, Actions]


def _packed(actions: Actions) -> list[int]:
    return [to_code(action) for action in actions if action is not None]


def _named(codes: Sequence[int]) -> list[NamedAction]:
    return [of_code(code) for code in codes]


def add_reduce_grad(actions: Actions, n_microbatches: int) -> list[NamedAction]:
    """REDUCE_GRAD after the last backward of each stage."""
    return _named(reduce_grad(_packed(actions), n_microbatches))


def add_unshard_reshard(compute_actions: Actions, max_active_stages: int = 3) -> list[NamedAction]:
    """UNSHARD before the use of a stage, RESHARD after it."""
    return _named(unshard_reshard(_packed(compute_actions), max_active_stages))


def merge_bw(compute_actions: Actions) -> list[NamedAction]:
    """An I and the W that follows it become a B. The list that is given stays as it is."""
    codes = _packed(compute_actions)
    return _named(merge(codes, {leaf.stage_index for action in compute_actions if action for leaf in action.leaves}))


def add_send_recv(
    compute_actions: Order, stage_to_rank: Callable[[int], int], num_stages: int
) -> dict[int, list[NamedAction]]:
    """The order with its messages. The dictionary that is given stays as it is."""
    lowered = messages_in_turn(slots_of(compute_actions), stage_to_rank, num_stages)
    return {rank: _named(codes) for rank, codes in lowered.items()}


def defer_recv_ops(actions: Order, stage_to_rank: Callable[[int], int]) -> dict[int, list[NamedAction]]:
    """Receives moved down to their use."""
    return {rank: _named(codes) for rank, codes in defer_receives(codes_of(actions), stage_to_rank).items()}


def simulate_comms_compute(
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


def format_pipeline_order(pipeline_order: Order, error_step_number: int | None = None) -> str:
    """A table: a row a step, a column a rank."""
    ranks = sorted(pipeline_order)
    steps = max((len(pipeline_order[rank]) for rank in ranks), default=0)
    cells = [
        [str(row[step]) if step < len(row) and row[step] is not None else "" for step in range(steps)]
        for row in (pipeline_order[rank] for rank in ranks)
    ]
    titles = [f"Rank {rank}" for rank in ranks]
    widths = [max(map(len, (title, *column))) for title, column in zip(titles, cells, strict=True)]
    digits = len(str(max(steps - 1, 0)))
    lines = [" ".join([" " * (digits + 6), *(title.ljust(width) for title, width in zip(titles, widths, strict=True))])]
    for step in range(steps):
        row = [column[step].ljust(width) for column, width in zip(cells, widths, strict=True)]
        mark = " <-- ERROR HERE" if step == error_step_number else ""
        lines.append(" ".join([f"Step {step:0{digits}}:", *row]) + mark)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def dump_chrometrace(schedule: Order, filename: Any) -> None:
    """Write an order, a slot a microsecond, as a trace that chrome://tracing and Perfetto show."""
    events = [
        {
            "name": str(action),
            "cat": "computation" if action.is_compute_op else "communication",
            "ph": "X",
            "pid": rank,
            "tid": rank,
            "ts": step,
            "dur": 1,
        }
        for rank in sorted(schedule)
        for step, action in enumerate(schedule[rank])
        if action is not None
    ]
    Path(filename).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
