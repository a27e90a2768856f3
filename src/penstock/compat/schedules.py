"""`torch.distributed.pipelining.schedules`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from os import PathLike
from typing import Any

from torch import Tensor

from penstock import run
from penstock.batch import TensorChunkSpec
from penstock.compat._pipeline_order import Format
from penstock.compat._schedule import _PipelineSchedule
from penstock.compat._siblings import found_in
from penstock.compat._stage_base import _PipelineStageBase
from penstock.compat._vocabulary import ComputationType as _ComputationType
from penstock.compat._vocabulary import NamedAction as _Action
from penstock.errors import UnknownNameError
from penstock.nest import Value
from penstock.stage.pipeline_stage import PipelineStage as CoreStage

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
__getattr__ = found_in(__name__, "._orders", "._p2p", "._ranks", "._hand_stage", "._exchange", "._infer")

__all__ = [
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "get_schedule_class",
]


class PipelineScheduleSingle(_PipelineSchedule, run.PipelineScheduleSingle):
    """One stage a rank."""

    def __init__(
        self,
        stage: CoreStage,
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        args_chunk_spec: Value = None,
        kwargs_chunk_spec: Value = None,
        output_merge_spec: Value = None,
        scale_grads: bool = True,
        **options: object,
    ) -> None:
        specs = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        super().__init__(stage, n_microbatches, loss_fn, *specs, scale_grads, **options)

    @property
    def _stage(self) -> CoreStage:
        return self.stages[0]

    @_stage.setter
    def _stage(self, stage: CoreStage) -> None:
        self._stages = [stage]


class PipelineScheduleMulti(_PipelineSchedule, run.PipelineScheduleMulti):
    """Several stages a rank."""

    _adjacent_only = True

    def __init__(
        self,
        stages: Sequence[CoreStage],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        args_chunk_spec: Value = None,
        kwargs_chunk_spec: Value = None,
        output_merge_spec: Value = None,
        use_full_backward: bool | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        **options: object,
    ) -> None:
        specs = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        options["backward_requires_autograd"] = backward_requires_autograd
        super().__init__(stages, n_microbatches, loss_fn, *specs, scale_grads, **options)
        self.use_full_backward = use_full_backward


class _PipelineScheduleRuntime(PipelineScheduleMulti):
    """Several stages a rank, and an order that a program may give: computations, or these and their messages.

    schedule = _PipelineScheduleRuntime(stages, n_microbatches=8, loss_fn=loss_fn)
    schedule._load_csv("plan.csv", format="compute_comms")
    """

    def __init__(self, *args: Value, defer_pp_recv: bool = False, **options: Value) -> None:
        super().__init__(*args, defer_pp_recv=defer_pp_recv, **options)
        self._defer_pp_recv = defer_pp_recv

    def _dump_csv(self, filename: str | PathLike[str], format: Format = "compute_comms") -> None:  # noqa: A002
        super()._dump_csv(filename, format)


class _Named(_PipelineScheduleRuntime):
    """Several stages a rank, and an order that has a name. Programs may give everything by position."""

    def __init__(
        self,
        stages: Sequence[CoreStage],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        args_chunk_spec: Value = None,
        kwargs_chunk_spec: Value = None,
        output_merge_spec: Value = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        **options: object,
    ) -> None:
        specs = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        given = {"scale_grads": scale_grads, "backward_requires_autograd": backward_requires_autograd}
        super().__init__(stages, n_microbatches, loss_fn, *specs, defer_pp_recv=defer_pp_recv, **given, **options)

    def _add_bubbles_to_actions(self, num_stages_global: int) -> dict[int, list[_Action | None]]:
        """The order with None in the slots in which a rank waits."""
        from penstock.compat._schedule_visualizer import add_schedule_op_spacing

        order = self.pipeline_order
        return dict(zip(sorted(order), add_schedule_op_spacing([order[rank] for rank in sorted(order)]), strict=True))


class _ScheduleForwardOnly(PipelineScheduleSingle, run.ScheduleForwardOnly): ...


class ScheduleGPipe(PipelineScheduleSingle, run.ScheduleGPipe): ...


class Schedule1F1B(PipelineScheduleSingle, run.Schedule1F1B): ...


class ScheduleZBH1(PipelineScheduleSingle, run.ScheduleZBH1): ...


class ScheduleZBH2(PipelineScheduleSingle, run.ScheduleZBH2): ...


class ScheduleLoopedBFS(_Named, run.ScheduleLoopedBFS):
    """As torch's, which takes the specs of arguments by name only."""

    def __init__(
        self,
        stages: Sequence[CoreStage],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        output_merge_spec: Value = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        **options: Value,
    ) -> None:
        given = {"scale_grads": scale_grads, "backward_requires_autograd": backward_requires_autograd}
        options |= {**given, "output_merge_spec": output_merge_spec, "defer_pp_recv": defer_pp_recv}
        super().__init__(stages, n_microbatches, loss_fn, **options)


class _Interleaved(_Named):
    """Microbatches go through the stages of a rank in rounds."""

    @cached_property
    def number_of_rounds(self) -> int:
        return max(1, self.num_microbatches // self.pp_group_size)

    @cached_property
    def microbatches_per_round(self) -> int:
        return self.num_microbatches // self.number_of_rounds


class ScheduleInterleaved1F1B(_Interleaved, run.ScheduleInterleaved1F1B): ...


class ScheduleInterleavedZeroBubble(_Interleaved, run.ScheduleInterleavedZeroBubble): ...


class ScheduleZBVZeroBubble(_Named, run.ScheduleZBVZeroBubble): ...


class ScheduleDualPipeV(_Named, run.ScheduleDualPipeV): ...


class ScheduleVHalf(_Named, run.ScheduleVHalf): ...


class ScheduleVMin(_Named, run.ScheduleVMin): ...


_ONE_STAGE: tuple[object, ...] = (ScheduleGPipe, Schedule1F1B, ScheduleZBH1, ScheduleZBH2, PipelineScheduleSingle)
_SEVERAL_STAGES: tuple[Any, ...] = (
    *(ScheduleLoopedBFS, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble),
    *(ScheduleDualPipeV, ScheduleVHalf, ScheduleVMin, PipelineScheduleMulti),
)
_CLASSES = {kind.__name__.removeprefix("Schedule"): kind for kind in (*_ONE_STAGE, *_SEVERAL_STAGES)}
_CLASSES["VZB"] = ScheduleZBVZeroBubble  # the papers have two names for it


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


def _requires_reduce_grad(action_type: _ComputationType) -> bool:
    """Whether gradients of parameters are there after an action of this kind."""
    return action_type in (FULL_BACKWARD, BACKWARD_WEIGHT)


def _check_torch_compile_compatibility(stages: list[_PipelineStageBase], schedule_name: str) -> None:
    """Compiled stages run under every schedule here: there is nothing to refuse."""


def _get_profiler_function_name(action: _Action) -> str:
    """How the range of an action is called in a profile."""
    return f"penstock:{action}"
