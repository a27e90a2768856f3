"""While a run goes on: some steps between two checkpoints are measured, to find a rank that is slow for good."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.balance import Profile
from penstock.front import Pipeline
from penstock.run.record import Recorder, Recording
from penstock.simulate import Timeline

_MEASURED = (
    4  # steps between two checkpoints, spread over all of them: who is slow in some of them only is not slow for good
)


@dataclass
class Recutter:
    """Asked around every step: ``if recutter.wants(step): recutter.take(pipe, recorder)``."""

    share: float  # of a step that another cut must save; 0: the cut stays
    every: int  # steps between two checkpoints
    timelines: list[Timeline] = field(default_factory=list)

    def wants(self, step: int) -> bool:
        """Whether the step is to be measured; alike on all ranks.

        >>> [step for step in range(20) if Recutter(0.1, 10).wants(step)]
        [1, 4, 6, 9, 11, 14, 16, 19]
        """
        if not self.share or self.every < _MEASURED:
            return False
        return (step + 1) % self.every in {self.every * (k + 1) // _MEASURED % self.every for k in range(_MEASURED)}

    def take(self, pipe: Pipeline, recorder: Recorder) -> None:
        """Keep the times of a measured step, of all ranks."""
        recording = Recording()
        recording.finish(recorder, pipe.transport)
        if recording.timeline.plan == pipe.schedule.lowered_plan():  # a batch of few rows has a plan of its own
            self.timelines.append(recording.timeline)

    def profile(self, pipe: Pipeline) -> Profile | None:
        """At a checkpoint: what to cut by from now on, if that is worth it."""
        timelines, self.timelines = self.timelines, []
        return pipe.recut(timelines, gain=self.share) if len(timelines) >= _MEASURED else None
