"""The schedule classes that PyTorch users know: a name, a plan function, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.checks import check_types
from penstock.errors import StageError
from penstock.lower import JustInTime
from penstock.nest import Value
from penstock.run.schedule import Schedule
from penstock.stage.pipeline_stage import PipelineStage


class PipelineScheduleSingle(Schedule):
    """One stage a rank. What follows the number of microbatches is as in `Schedule`.

    class ScheduleMine(PipelineScheduleSingle):
        recipe = "mine"  # the name of a registered schedule
    """

    def __init__(self, stage: PipelineStage, n_microbatches: int, *args: Value, **options: Value) -> None:
        if isinstance(stage, (list, tuple)):
            raise StageError(
                f"{type(self).__name__} takes one stage, got {len(stage)}; pass the stage itself, not a list"
            )
        super().__init__([stage], n_microbatches, *args, **options)


class PipelineScheduleMulti(Schedule):
    """Several stages a rank. What follows the number of microbatches is as in `Schedule`.

        class ScheduleMine(PipelineScheduleMulti):
            recipe = "mine"  # the name of a registered schedule

    `defer_pp_recv`               True: a receive is posted just before what needs it, and not ahead.
    `backward_requires_autograd`  False: functions of your own differentiate, so `step` may be called under `no_grad`.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        *args: Value,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        **options: Value,
    ) -> None:
        if not isinstance(stages, (list, tuple)):
            raise StageError(
                f"{type(self).__name__} takes a list of stages, got {type(stages).__name__}; write [stage]"
            )
        check_types(type(self).__name__, StageError, defer_pp_recv=(defer_pp_recv, bool | int))
        if defer_pp_recv:
            options.setdefault("receives", JustInTime())
        super().__init__(stages, n_microbatches, *args, **options)
        self._needs_autograd = backward_requires_autograd


class ScheduleForwardOnly(PipelineScheduleSingle):
    """Forward only, for evaluation.

    schedule = ScheduleForwardOnly(stage, n_microbatches=8, loss_fn=loss_fn)
    schedule.step(batch, target=labels)
    """

    recipe = "forward"


class ScheduleGPipe(PipelineScheduleSingle):
    """All forwards, then all backwards.

    schedule = ScheduleGPipe(stage, n_microbatches=8, loss_fn=loss_fn)
    schedule.step(batch, target=labels)
    """

    recipe = "gpipe"


class Schedule1F1B(PipelineScheduleSingle):
    """One forward, one backward: no more microbatches in flight than there are stages.

    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)
    schedule.step(batch, target=labels)
    """

    recipe = "1f1b"


class ScheduleZBH1(PipelineScheduleSingle):
    """Zero bubble with the memory of 1F1B.

    schedule = ScheduleZBH1(stage, n_microbatches=8, loss_fn=loss_fn)
    schedule.step(batch, target=labels)
    """

    recipe = "zb-h1"


class ScheduleZBH2(PipelineScheduleSingle):
    """Zero bubble with twice the memory of 1F1B, and hardly a bubble.

    schedule = ScheduleZBH2(stage, n_microbatches=8, loss_fn=loss_fn)
    schedule.step(batch, target=labels)
    """

    recipe = "zb-h2"


class ScheduleLoopedBFS(PipelineScheduleMulti):
    """Breadth first over several stages a rank.

    schedule = ScheduleLoopedBFS(stages, n_microbatches=8, loss_fn=loss_fn)
    schedule.step(batch, target=labels)
    """

    recipe = "loopedbfs"


class ScheduleInterleaved1F1B(PipelineScheduleMulti):
    """1F1B over several stages a rank.

    schedule = ScheduleInterleaved1F1B(stages, n_microbatches=8, loss_fn=loss_fn)
    schedule.step(batch, target=labels)
    """

    recipe = "interleaved1f1b"


class ScheduleInterleavedZeroBubble(PipelineScheduleMulti):
    """Interleaved 1F1B whose weight work fills the gaps.

    schedule = ScheduleInterleavedZeroBubble(stages, n_microbatches=8, loss_fn=loss_fn)
    schedule.step(batch, target=labels)
    """

    recipe = "interleavedzerobubble"


class ScheduleZBVZeroBubble(PipelineScheduleMulti):
    """Two stages a rank in a V, and no bubble where the halves of a backward cost the same as a forward.

    schedule = ScheduleZBVZeroBubble(stages, n_microbatches=8, loss_fn=loss_fn)
    schedule.step(batch, target=labels)
    """

    recipe = "zbv"


class ScheduleDualPipeV(PipelineScheduleMulti):
    """Two stages a rank in a V; forwards are paired with backwards, to overlap.

    schedule = ScheduleDualPipeV(stages, n_microbatches=8, loss_fn=loss_fn)
    schedule.step(batch, target=labels)
    """

    recipe = "dualpipev"


class ScheduleVHalf(PipelineScheduleMulti):
    """A V with half the memory of 1F1B.

    schedule = ScheduleVHalf(stages, n_microbatches=8, loss_fn=loss_fn)
    schedule.step(batch, target=labels)
    """

    recipe = "v-half"


class ScheduleVMin(PipelineScheduleMulti):
    """A V with a third of the memory of 1F1B.

    schedule = ScheduleVMin(stages, n_microbatches=8, loss_fn=loss_fn)
    schedule.step(batch, target=labels)
    """

    recipe = "v-min"


ScheduleVZB = ScheduleZBVZeroBubble  # the papers have two names for it
