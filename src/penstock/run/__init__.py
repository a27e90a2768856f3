"""Boxes and programs, a handler an Op, the loop, the Schedule classes, the measured Timeline."""

from __future__ import annotations

from penstock.run.classes import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleForwardOnly,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleVHalf,
    ScheduleVMin,
    ScheduleVZB,
    ScheduleZBH1,
    ScheduleZBH2,
    ScheduleZBVZeroBubble,
)
from penstock.run.context import ActionContext
from penstock.run.record import Recording
from penstock.run.rng import microbatch_rng
from penstock.run.schedule import Schedule

__all__ = [
    "ActionContext",
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "Recording",
    "Schedule",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleForwardOnly",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleVHalf",
    "ScheduleVMin",
    "ScheduleVZB",
    "ScheduleZBH1",
    "ScheduleZBH2",
    "ScheduleZBVZeroBubble",
    "microbatch_rng",
]
