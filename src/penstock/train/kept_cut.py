"""How a run's model is cut: kept in its folder, so that a run that goes on is cut as it was, and cut anew for a slow rank."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from penstock.balance import Profile
from penstock.front import Pipeline
from penstock.run.record import Recording
from penstock.simulate import Timeline
from penstock.train.train_options import OPTIONS, TrainOptions, read_json

CHOICE, PROFILE = "choice.json", "profile.json"
# Steps between two checkpoints, spread over all of them: who is slow in some of them only is not slow for good.
_MEASURED = 4


def kept_cut(options: TrainOptions, ranks: int) -> dict[str, object]:
    """The schedule, the stages and the profile of a run that goes on, as long as the same is asked for: the same random
    numbers, the same run. Empty: the model is cut anew.
    """
    file = options.folder / CHOICE
    if not options.resume or not file.is_file():
        return {}
    kept = read_json(file)
    if not _asked(options, ranks).items() <= kept.items() or not {"schedule", "stages"} <= kept.keys():
        return {}
    return {"schedule": kept["schedule"], "stages": kept["stages"], "profile": Profile.load(options.folder / PROFILE)}


def keep_cut(pipe: Pipeline, options: TrainOptions) -> None:
    """Write it down, with the options of the run."""
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / OPTIONS).write_text(options.dumps(), encoding="utf-8")
    if pipe.choice is not None:
        pipe.choice.profile.save(folder / PROFILE)
    facts = {"schedule": pipe.plan.name, "stages": pipe.plan.num_stages, **_asked(options, pipe.num_ranks)}
    (folder / CHOICE).write_text(json.dumps(facts), encoding="utf-8")


def _asked(options: TrainOptions, ranks: int) -> dict[str, object]:
    """What a cut was chosen for."""
    return {"ranks": ranks, "microbatches": options.microbatches, "asked": [options.schedule, options.stages]}


@dataclass
class Recutter:
    """Some steps between two checkpoints are measured, to find a rank that is slow for good.

    if recutter.wants(step): recutter.take(pipe, recording)
    """

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

    def take(self, pipe: Pipeline, recording: Recording) -> None:
        """Keep the times of a measured step, of all ranks."""
        if recording.timeline.plan == pipe.schedule.lowered_plan():  # a batch of few rows has a plan of its own
            self.timelines.append(recording.timeline)

    def profile(self, pipe: Pipeline) -> Profile | None:
        """At a checkpoint: what to cut by from now on, if that is worth it."""
        timelines, self.timelines = self.timelines, []
        return pipe.recut(timelines, gain=self.share) if len(timelines) >= _MEASURED else None
