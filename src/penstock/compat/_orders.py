"""Passes over orders: dictionaries from rank to lists of named actions, in which None is an idle slot."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import zip_longest
from os import PathLike
from pathlib import Path

from penstock.compat._in_turn import chain_rules, defer_receives, messages_in_turn, take_turns
from penstock.compat._vocabulary import (
    Actions,
    NamedAction,
    Order,
    OrderDict,
    leaves_of,
    named,
    of_code,
    packed,
    plan_of,
    to_code,
)
from penstock.errors import DeadlockError, IncompleteError, PlanError
from penstock.lower.merge import merge
from penstock.lower.reduce import reduce_grad
from penstock.lower.shards import unshard_reshard
from penstock.plan import check
from penstock.plan.actions import KEY, MICROBATCH_FIELD, OP, parts, with_op
from penstock.plan.ops import ROWS


def add_reduce_grad(actions: Actions, n_microbatches: int) -> list[NamedAction | None]:
    """REDUCE_GRAD after the last backward of each stage."""
    return named(reduce_grad(packed(actions), n_microbatches))


def add_unshard_reshard(compute_actions: Actions, max_active_stages: int = 3) -> list[NamedAction | None]:
    """UNSHARD before the use of a stage, RESHARD after it."""
    return named(unshard_reshard(packed(compute_actions), max_active_stages))


def merge_bw(compute_actions: Actions) -> list[NamedAction | None]:
    """An I and the W that follows it become a B. The list that is given stays as it is."""
    return named(merge(packed(compute_actions), {leaf.stage_index for leaf in leaves_of([compute_actions])}))


def add_send_recv(compute_actions: Order, stage_to_rank: Callable[[int], int], num_stages: int) -> OrderDict:
    """The order with its messages. The dictionary that is given stays as it is."""
    slots = {rank: [action and to_code(action) for action in row] for rank, row in compute_actions.items()}
    lowered = messages_in_turn(slots, stage_to_rank, num_stages)
    return {rank: named(codes) for rank, codes in lowered.items()}


def defer_recv_ops(actions: Order, stage_to_rank: Callable[[int], int]) -> OrderDict:
    """Receives moved down to their use."""
    codes = {rank: packed(row) for rank, row in actions.items()}
    return {rank: named(row) for rank, row in defer_receives(codes, stage_to_rank).items()}


def simulate_comms_compute(pipeline_order: Order, stage_to_rank: Callable[[int], int], num_stages: int) -> OrderDict:
    """Work through a lowered order in lockstep, one slot an action: which rank does what in which slot, None where it waits.

    A rank that waits gets a second chance in the same slot, after all others. penstock's own clock is `penstock.simulate`.
    """
    rules = chain_rules(stage_to_rank, num_stages)
    rows = {rank: packed(pipeline_order[rank]) for rank in sorted(pipeline_order)}
    slots: OrderDict = {rank: [] for rank in rows}
    done: set[int] = set()

    def turn(rank: int, code: int, slot: int) -> bool:
        for part in parts(code):
            if any(need | part & MICROBATCH_FIELD not in done for need in rules.needs(part & KEY)):
                return False
        slots[rank] += (*[None] * (slot - len(slots[rank])), of_code(code))
        for part in parts(code):
            done.update((part, *(with_op(part, half) for half in ROWS[part & OP].halves)))
        return True

    if stuck := take_turns(rows, turn, chances=2):
        waiting = ", ".join(f"rank {rank} at {of_code(code)}" for rank, code in stuck.items())
        raise DeadlockError(f"Schedule is not progressing: {waiting} wait for ever")
    return slots


def validate_schedule(actions: Order, pp_group_size: int, num_stages: int, num_microbatches: int) -> dict[int, int]:
    """Prove an order complete and free of deadlocks; the rank of each stage."""
    if sorted(actions) != list(range(pp_group_size)):
        raise IncompleteError(f"an order for the ranks {sorted(actions)}; expected the ranks 0 to {pp_group_size - 1}")
    try:
        plan = plan_of(actions, num_microbatches=num_microbatches, num_stages=num_stages)
        check(plan)
    except AssertionError:
        raise
    except PlanError as error:
        raise IncompleteError(str(error)) from error
    if not plan.has_backward:
        raise IncompleteError("an order without a backward; expected a B, or an I and a W, for every F")
    return dict(enumerate(plan.placement.ranks))


def format_pipeline_order(pipeline_order: Order, error_step_number: int | None = None) -> str:
    """A table: a row a step, a column a rank."""
    ranks = sorted(pipeline_order)
    columns = [[f"Rank {rank}", *(str(action or "") for action in pipeline_order[rank])] for rank in ranks]
    widths = [max(map(len, column)) for column in columns]
    rows = list(zip_longest(*columns, fillvalue="")) or [()]
    digits = len(str(max(len(rows) - 2, 0)))
    lines = []
    for step, row in enumerate(rows, -1):
        head = f"Step {step:0{digits}}:" if step >= 0 else " " * (digits + 6)
        mark = " <-- ERROR HERE" if step == error_step_number else ""
        lines.append(" ".join([head, *map(str.ljust, row, widths)]) + mark)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def dump_chrometrace(schedule: Order, filename: str | PathLike[str]) -> None:
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
