"""`torch.distributed.pipelining._schedule_visualizer`.

    ops = get_schedule_ops("InterleavedZeroBubble", 4, 8)
    visualize_schedule(ops, "schedule.svg")

penstock's own is `penstock.show`: drawings, pages that zoom, traces.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penstock.compat._orders import NamedAction, leaves_of, plan_of
from penstock.compat._schedule import _PipelineSchedule
from penstock.compat._siblings import found_in
from penstock.compat.schedules import PipelineScheduleMulti, PipelineScheduleSingle, get_schedule_class
from penstock.errors import PlanError
from penstock.show import to_svg
from penstock.simulate import Costs, Timeline, simulate

__getattr__ = found_in(__name__)
Rows = list[list[NamedAction | None]]


def get_schedule_ops(
    schedule: str | type[_PipelineSchedule],
    pp_degree: int,  # ranks
    num_microbatches: int,
    num_stages_per_rank: int | None = None,  # None: as few as the schedule takes
    add_spacing: bool = False,  # idle slots too
    with_comms: bool = False,  # messages too
    defer_pp_recv: bool = False,  # and receives as late as they may be
) -> Rows:
    """The actions of each rank under a schedule, by its name or class; no stage and no process is needed."""
    if add_spacing and with_comms:
        raise PlanError("add_spacing and with_comms at once; expected one of them: messages take no slots")
    kind = get_schedule_class(schedule) if isinstance(schedule, str) else schedule
    if not isinstance(kind, type) or not issubclass(kind, (PipelineScheduleSingle, PipelineScheduleMulti)):
        raise PlanError(f"{schedule!r} is no schedule; expected its name or its class")
    several = issubclass(kind, PipelineScheduleMulti)
    per_rank = (2 if several else 1) if num_stages_per_rank is None else num_stages_per_rank
    if (per_rank != 1) != several:
        raise AssertionError(f"{per_rank} stages a rank for {kind.__name__}; expected {'2 or more' if several else 1}")
    sizes = {"group_rank": 0, "group_size": pp_degree, "num_stages": pp_degree * per_rank}
    # As much of a stage as a schedule looks at.
    place: Any = SimpleNamespace(submod=None, group=None, stage_index=0, **sizes)
    made = kind([place] * per_rank if several else place, num_microbatches)
    order = made.pipeline_order
    if with_comms:
        made._defer_pp_recv = defer_pp_recv
        made._prepare_schedule_with_comms(order)
        order = made.pipeline_order_with_comms
    rows = [list(order[rank]) for rank in range(pp_degree)]
    return add_schedule_op_spacing(rows) if add_spacing else rows


def _timeline(schedule: Rows) -> Timeline:
    leaves = list(leaves_of(schedule))
    stages = 1 + max(leaf.stage_index for leaf in leaves)
    microbatches = 1 + max(leaf.microbatch_index or 0 for leaf in leaves)
    plan = plan_of(dict(enumerate(schedule)), num_microbatches=microbatches, num_stages=stages)
    return simulate(plan, Costs.per_rank(num_stages=stages, stages_per_rank=1))  # a slot for each F, I and W of a stage


def add_schedule_op_spacing(schedule: Rows) -> Rows:
    """The same actions with None in the slots in which a rank waits; a full backward takes two slots."""
    if not any(action is not None for row in schedule for action in row):
        return schedule
    timeline = _timeline(schedule)
    spaced: Rows = []
    for rank, row in enumerate(schedule):
        slots: list[NamedAction | None] = []
        actions = [action for action in row if action is not None]
        for action, start in zip(actions, timeline.starts[rank], strict=True):
            slots += (*[None] * (round(start) - len(slots)), action)
        spaced.append(slots)
    return spaced


def visualize_schedule(schedule: Rows, filename: str | None = None) -> str:
    """Draw the actions of all ranks as an SVG, to a file if one is named; the drawing comes back as text."""
    drawing = to_svg(_timeline(schedule))
    if filename is not None:
        Path(filename).write_text(drawing, encoding="utf-8")
    return drawing
