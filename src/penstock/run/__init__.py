"""Stages and a plan at work: the Schedule classes, and what a step of them is made of.

schedule  schedule and classes (the names that PyTorch users know); planning (the plan for these stages, and another
          one between two steps)
bound     binding (lowered and proved, one program for each mode), setting, program (a flat list of calls), handlers (what does
          an action), meeting (what ranks compare)
step      preamble (tell, and the verdict), runner (run, conclude), draining (after a failure), ties, rng
action    stage_run (forward and backward), call_arguments, last_stage, feed (to a device)
between   boxes (values in flight), channel (messages in order), layout (what a message looks like)
compiled  ahead (all ranks compile before the first microbatch), compiled_costs
watched   lookout (where each rank is); penstock.observe has the observers of steps
"""

from __future__ import annotations

from penstock.observe.recording import Recording
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
from penstock.run.program import ActionContext
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
