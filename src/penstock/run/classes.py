"""The schedule classes that PyTorch users know: a name, a plan function, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from penstock.errors import StageError
from penstock.lower import JustInTime
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


class PipelineScheduleMulti(Schedule):
    """Several stages a rank.

    `defer_pp_recv`               True: a receive is posted just before what needs it, and not ahead.
    `backward_requires_autograd`  False: functions of your own differentiate, so `step` may be called under `no_grad`.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        *,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        **options: Any,
    ) -> None:
        if not isinstance(stages, (list, tuple)):
            raise StageError(
                f"{type(self).__name__} takes a list of stages, got {type(stages).__name__}; write [stage]"
            )
        if defer_pp_recv:
            options.setdefault("receives", JustInTime())
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
        self._needs_autograd = backward_requires_autograd


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


class ScheduleLoopedBFS(PipelineScheduleMulti):
    recipe = "loopedbfs"


class ScheduleInterleaved1F1B(PipelineScheduleMulti):
    recipe = "interleaved1f1b"


class ScheduleInterleavedZeroBubble(PipelineScheduleMulti):
    recipe = "interleavedzerobubble"


class ScheduleZBVZeroBubble(PipelineScheduleMulti):
    recipe = "zbv"


class ScheduleDualPipeV(PipelineScheduleMulti):
    recipe = "dualpipev"


class ScheduleVHalf(PipelineScheduleMulti):
    recipe = "v-half"


class ScheduleVMin(PipelineScheduleMulti):
    recipe = "v-min"


ScheduleVZB = ScheduleZBVZeroBubble  # the papers have two names for it
