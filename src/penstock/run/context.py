"""ActionContext: what a user's own function for a kind of action has to work with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.plan import AnyAction
from penstock.run.inputs import StepInputs
from penstock.run.program import Program
from penstock.stage.pipeline_stage import PipelineStage

if TYPE_CHECKING:
    from penstock.run.schedule import Schedule

CustomFunction = Callable[[AnyAction, "ActionContext"], object]


class ActionContext:
    """What a user's function for a kind of action is given beside the action.

    def overlapped(action, context):
        context.run(action.first)
        context.run(action.second)

    schedule.register_custom_function(Overlap, overlapped)
    """

    def __init__(self, schedule: Schedule, program: Program, *, cold: bool) -> None:
        self.schedule = schedule
        self.cold = cold  # whether messages of this step describe themselves; see `penstock.run.layout`
        self._program = program

    def stage(self, index: int) -> PipelineStage:
        """A stage of this rank."""
        return self._program.stages[index]

    @property
    def inputs(self) -> StepInputs:
        """The microbatches of this step: `args`, `kwargs`, `targets`."""
        return next(iter(self._program.runs.values())).inputs

    def run(self, action: AnyAction) -> None:
        """Do an action as penstock does it; messages of the step included."""
        self._program.default(action, cold=self.cold)()
