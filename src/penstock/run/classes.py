"""The schedule classes that PyTorch users know: a name, a plan function, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from penstock.errors import StageError
from penstock.run.orders import defers
from penstock.run.schedule import Schedule
from penstock.stage.stage import PipelineStage


class PipelineScheduleSingle(Schedule):
    """One stage a rank."""

    def __init__(
        self,
        stage: PipelineStage,
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        **options: Any,
    ) -> None:
        if isinstance(stage, (list, tuple)):
            raise StageError(
                f"{type(self).__name__} takes one stage, got {len(stage)}; pass the stage itself, not a list"
            )
        super().__init__(
            [stage],
            n_microbatches,
            loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            **options,
        )
        self._stage = stage


class PipelineScheduleMulti(Schedule):
    """Several stages a rank."""

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        use_full_backward: bool | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        **options: Any,
    ) -> None:
        if not isinstance(stages, (list, tuple)):
            raise StageError(
                f"{type(self).__name__} takes a list of stages, got {type(stages).__name__}; write [stage]"
            )
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            **options,
        )
        self.use_full_backward = use_full_backward
        self._backward_requires_autograd = backward_requires_autograd


class PipelineScheduleRuntime(PipelineScheduleMulti):
    """Several stages a rank, and an order that a program may give: computations, or these and their messages.

    schedule = PipelineScheduleRuntime(stages, n_microbatches=8, loss_fn=loss_fn)
    schedule._load_csv("plan.csv", format="compute_comms")
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        *specs: Any,
        defer_pp_recv: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(stages, n_microbatches, loss_fn, *specs, **{**defers(defer_pp_recv), **options})
        self._defer_pp_recv = defer_pp_recv


class ScheduleForwardOnly(PipelineScheduleSingle):
    recipe = "forward"


class ScheduleGPipe(PipelineScheduleSingle):
    recipe = "gpipe"


class Schedule1F1B(PipelineScheduleSingle):
    recipe = "1f1b"


class ScheduleZBH1(PipelineScheduleSingle):
    recipe = "zb-h1"


class ScheduleZBH2(PipelineScheduleSingle):
    recipe = "zb-h2"


class ScheduleLoopedBFS(PipelineScheduleRuntime):
    recipe = "loopedbfs"


class ScheduleInterleaved1F1B(PipelineScheduleRuntime):
    recipe = "interleaved1f1b"


class ScheduleInterleavedZeroBubble(PipelineScheduleRuntime):
    recipe = "interleavedzerobubble"


class ScheduleZBVZeroBubble(PipelineScheduleRuntime):
    recipe = "zbv"


class ScheduleDualPipeV(PipelineScheduleRuntime):
    recipe = "dualpipev"


class ScheduleVHalf(PipelineScheduleRuntime):
    recipe = "v-half"


class ScheduleVMin(PipelineScheduleRuntime):
    recipe = "v-min"


ScheduleVZB = ScheduleZBVZeroBubble  # the papers have two names for it
