"""`torch.distributed.pipelining.schedules`."""

from __future__ import annotations

import re
from typing import Any

import torch.distributed as dist  # noqa: F401  programs patch what stands here

from penstock.batch import TensorChunkSpec
from penstock.compat._by_hand import CustomFunction as _CustomFunctionProtocol
from penstock.compat._by_hand import PipelineContext as _PipelineContext
from penstock.compat._exchange import RecvInfo as _RecvInfo
from penstock.compat._infer import PipelineStage
from penstock.compat._lockstep import in_lockstep as _simulate_comms_compute
from penstock.compat._orders import add_reduce_grad as _add_reduce_grad
from penstock.compat._orders import add_send_recv as _add_send_recv
from penstock.compat._orders import add_unshard_reshard as _add_unshard_reshard
from penstock.compat._orders import defer_recv_ops as _defer_recv_ops
from penstock.compat._orders import dump_chrometrace as _dump_chrometrace
from penstock.compat._orders import format_pipeline_order as _format_pipeline_order
from penstock.compat._orders import merge_bw as _merge_bw
from penstock.compat._p2p import batch_p2p as _batch_p2p
from penstock.compat._p2p import sorted_batch_p2p as _sorted_batch_p2p
from penstock.compat._p2p import wait_batch_p2p as _wait_batch_p2p
from penstock.compat._pipeline_order import validate_order
from penstock.compat._ranks import get_1f1b_rank_ops as _get_1f1b_rank_ops
from penstock.compat._ranks import get_warmup_ops as _get_warmup_ops
from penstock.compat._schedule import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleVHalf,
    ScheduleVMin,
    ScheduleZBH1,
    ScheduleZBH2,
    ScheduleZBVZeroBubble,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
    _ScheduleForwardOnly,
)
from penstock.compat._siblings import found_in
from penstock.compat._stage_base import _PipelineStageBase
from penstock.compat._vocabulary import ComputationType as _ComputationType
from penstock.compat._vocabulary import NamedAction as _Action
from penstock.compat._vocabulary import Order
from penstock.errors import UnknownNameError

F = FORWARD = _ComputationType.FORWARD
I = BACKWARD_INPUT = _ComputationType.BACKWARD_INPUT  # noqa: E741  the letter is the vocabulary of the field
W = BACKWARD_WEIGHT = _ComputationType.BACKWARD_WEIGHT
B = FULL_BACKWARD = _ComputationType.FULL_BACKWARD
UNSHARD, RESHARD = _ComputationType.UNSHARD, _ComputationType.RESHARD
SEND_F, RECV_F = _ComputationType.SEND_F, _ComputationType.RECV_F
SEND_B, RECV_B = _ComputationType.SEND_B, _ComputationType.RECV_B
OVERLAP_F_B, REDUCE_GRAD = _ComputationType.OVERLAP_F_B, _ComputationType.REDUCE_GRAD
_TARGET_CHUNK_SPEC = TensorChunkSpec(0)
_action_regex = re.compile(rf"(\d+)({'|'.join(kind.value for kind in _ComputationType if kind != OVERLAP_F_B)})(\d*)")
__getattr__ = found_in(__name__, "_utils", "microbatch", "stage")

_ONE_STAGE: tuple[Any, ...] = (ScheduleGPipe, Schedule1F1B, ScheduleZBH1, ScheduleZBH2, PipelineScheduleSingle)
_SEVERAL_STAGES: tuple[Any, ...] = (
    *(ScheduleLoopedBFS, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble),
    *(ScheduleDualPipeV, ScheduleVHalf, ScheduleVMin, PipelineScheduleMulti),
)
_CLASSES = {kind.__name__.removeprefix("Schedule"): kind for kind in (*_ONE_STAGE, *_SEVERAL_STAGES)}
_CLASSES["VZB"] = ScheduleZBVZeroBubble  # the papers have two names for it

__all__ = [
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "_Action",
    "_ComputationType",
    "_CustomFunctionProtocol",
    "_PipelineContext",
    "_PipelineSchedule",
    "_PipelineScheduleRuntime",
    "_PipelineStageBase",
    "_RecvInfo",
    "_ScheduleForwardOnly",
    "_add_reduce_grad",
    "_add_send_recv",
    "_add_unshard_reshard",
    "_batch_p2p",
    "_defer_recv_ops",
    "_dump_chrometrace",
    "_format_pipeline_order",
    "_get_1f1b_rank_ops",
    "_get_profiler_function_name",
    "_get_warmup_ops",
    "_merge_bw",
    "_simulate_comms_compute",
    "_sorted_batch_p2p",
    "_validate_schedule",
    "_wait_batch_p2p",
    "get_schedule_class",
]


def get_schedule_class(schedule_name: str) -> type[_PipelineSchedule]:
    """The schedule class of that name, in any case, with or without "Schedule" before it.

    >>> get_schedule_class("interleaved1f1b").__name__
    'ScheduleInterleaved1F1B'
    """
    spellings = {spelling.lower(): kind for name, kind in _CLASSES.items() for spelling in (name, f"Schedule{name}")}
    found: type[_PipelineSchedule] | None = spellings.get(schedule_name.lower())
    if found is None:
        raise UnknownNameError(f"no schedule is called {schedule_name!r}; there are {', '.join(_CLASSES)}")
    return found


def _validate_schedule(actions: Order, pp_group_size: int, num_stages: int, num_microbatches: int) -> dict[int, int]:
    """Prove an order complete and free of deadlocks; the rank of each stage."""
    return validate_order(actions, pp_group_size, num_stages, num_microbatches)


def _requires_reduce_grad(action_type: _ComputationType) -> bool:
    """Whether gradients of parameters are there after an action of this kind."""
    return action_type in (FULL_BACKWARD, BACKWARD_WEIGHT)


def _check_torch_compile_compatibility(stages: list[_PipelineStageBase], schedule_name: str) -> None:
    """Compiled stages run under every schedule here: there is nothing to refuse."""


def _get_profiler_function_name(action: _Action) -> str:
    """How the range of an action is called in a profile."""
    return f"penstock:{action}"
