"""Passes over orders: dictionaries from rank to lists of named actions, in which None is an idle slot."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path

from penstock.compat._in_turn import defer_receives, messages_in_turn
from penstock.compat._vocabulary import NamedAction, codes_of, of_code, slots_of, to_code
from penstock.lower.merge import merge
from penstock.lower.reduce import reduce_grad
from penstock.lower.shards import unshard_reshard

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
