"""`torch.distributed.pipelining.schedules`."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property, wraps
from inspect import Parameter, Signature
from os import PathLike
from typing import Any

from penstock import run
from penstock.batch import TensorChunkSpec
from penstock.compat._orders import ComputationType as _ComputationType
from penstock.compat._orders import NamedAction as _Action
from penstock.compat._parts import Format
from penstock.compat._schedule import _PipelineSchedule
from penstock.compat._siblings import found_in
from penstock.errors import UnknownNameError
from penstock.nest import Value

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
__getattr__ = found_in(__name__, "._orders", "._hand_stage", "._exchange", ".stage")

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


_DEFAULTS: dict[str, object] = {"scale_grads": True, "backward_requires_autograd": True, "defer_pp_recv": False}
_DEFAULTS |= dict.fromkeys(("stage", "stages", "n_microbatches"), Parameter.empty)  # and None for all others


def _taking(names: str) -> Callable[[Callable[..., None]], Any]:
    """A constructor that takes these parameters by position too, in this order, as torch's does. It gets them by name."""
    kind = Parameter.POSITIONAL_OR_KEYWORD
    known = [Parameter(name, kind, default=_DEFAULTS.get(name)) for name in names.split()]
    first, others = Parameter("self", Parameter.POSITIONAL_ONLY), Parameter("options", Parameter.VAR_KEYWORD)
    signature = Signature([first, *known, others])

    def taking(init: Callable[..., None]) -> Callable[..., None]:
        @wraps(init)
        def by_name(*args: object, **options: object) -> None:
            given = signature.bind(*args, **options).arguments
            init(given.pop("self"), **given.pop("options", {}), **given)

        by_name.__signature__ = signature  # type: ignore[attr-defined]
        return by_name

    return taking


class PipelineScheduleSingle(_PipelineSchedule, run.PipelineScheduleSingle):
    """One stage a rank."""

    @_taking("stage n_microbatches loss_fn args_chunk_spec kwargs_chunk_spec output_merge_spec scale_grads")
    def __init__(self, **options: Value) -> None:
        super().__init__(**options)

    _stage = property(lambda self: self.stages[0], lambda self, stage: setattr(self, "_stages", [stage]))


class PipelineScheduleMulti(_PipelineSchedule, run.PipelineScheduleMulti):
    """Several stages a rank."""

    _adjacent_only = True

    @_taking(
        "stages n_microbatches loss_fn args_chunk_spec kwargs_chunk_spec output_merge_spec use_full_backward scale_grads "
        "backward_requires_autograd"
    )
    def __init__(self, use_full_backward: bool | None = None, **options: Value) -> None:
        super().__init__(**options)
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

    @_taking(
        "stages n_microbatches loss_fn args_chunk_spec kwargs_chunk_spec output_merge_spec scale_grads "
        "backward_requires_autograd defer_pp_recv"
    )
    def __init__(self, **options: Value) -> None:
        super().__init__(**options)

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

    @_taking("stages n_microbatches loss_fn output_merge_spec scale_grads backward_requires_autograd defer_pp_recv")
    def __init__(self, **options: Value) -> None:
        super().__init__(**options)


class _Interleaved(_Named):
    """Microbatches go through the stages of a rank in rounds."""

    number_of_rounds = cached_property[int](lambda self: max(1, self.num_microbatches // self.pp_group_size))
    microbatches_per_round = cached_property[int](lambda self: self.num_microbatches // self.number_of_rounds)


class ScheduleInterleaved1F1B(_Interleaved, run.ScheduleInterleaved1F1B): ...


class ScheduleInterleavedZeroBubble(_Interleaved, run.ScheduleInterleavedZeroBubble): ...


class ScheduleZBVZeroBubble(_Named, run.ScheduleZBVZeroBubble): ...


class ScheduleDualPipeV(_Named, run.ScheduleDualPipeV): ...


class ScheduleVHalf(_Named, run.ScheduleVHalf): ...


class ScheduleVMin(_Named, run.ScheduleVMin): ...


_CLASSES: dict[str, type[_PipelineSchedule]] = {
    name.removeprefix("Schedule"): kind
    for name, kind in globals().items()
    if name.startswith(("Schedule", "PipelineSchedule"))
}
_CLASSES["VZB"] = ScheduleZBVZeroBubble  # the papers have two names for it


def get_schedule_class(schedule_name: str) -> type[_PipelineSchedule]:
    """The schedule class of that name, in any case, with or without "Schedule" before it.

    >>> get_schedule_class("interleaved1f1b").__name__
    'ScheduleInterleaved1F1B'
    """
    spellings = {spelling.lower(): kind for name, kind in _CLASSES.items() for spelling in (name, f"Schedule{name}")}
    found = spellings.get(schedule_name.lower())
    if found is None:
        raise UnknownNameError(f"no schedule is called {schedule_name!r}; there are {', '.join(_CLASSES)}")
    return found


def _requires_reduce_grad(action_type: _ComputationType) -> bool:
    """Whether gradients of parameters are there after an action of this kind."""
    return action_type in (FULL_BACKWARD, BACKWARD_WEIGHT)


def _check_torch_compile_compatibility(stages: object, schedule_name: str) -> None:
    """Compiled stages run under every schedule here: there is nothing to refuse."""


def _get_profiler_function_name(action: _Action) -> str:
    """How the range of an action is called in a profile."""
    return f"penstock:{action}"
