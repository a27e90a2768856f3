"""What a run leaves for its next life and its report: what it has come to so far, how its model is cut, and when a rank was lost.

Whoever sees that a rank is gone notes since when, in the folder of the run: each rank writes a file there several times a second
as long as it lives, for `penstock top`. The next life of the run, which begins at the last checkpoint, counts from that last sign
of life to its first good step, and the report shows the seconds.
"""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from penstock.balance import Profile
from penstock.nest import Value
from penstock.run.lookout import FOLDER
from penstock.simulate import Timeline
from penstock.train.train_options import OPTIONS, TrainOptions, read_json

if TYPE_CHECKING:
    from penstock.front import Pipeline
    from penstock.observe.recording import Recording

LOSS = "lost.json"  # in the folder of the run: when the rank that is gone was there for the last time
RANKS = "ranks.json"  # there too, since a run has begun: the process of each rank
CHOICE, PROFILE = "choice.json", "profile.json"  # there too: how the model is cut
# Steps that are measured between two checkpoints, spread over all of them: who is slow in some of them only is not slow for good.
_MEASURED = 4
_RECENT = 20  # the steps that the speed is that of


@dataclass(frozen=True)
class Recovery:
    """A loss that the run got over."""

    step: int  # the first good one afterwards
    seconds: float  # from the last sign of life of the rank that was lost to the end of that step
    ranks: int  # that went on

    def __str__(self) -> str:
        return f"a rank was lost; step {self.step} was done {self.seconds:.1f} s later, on {self.ranks} ranks"


@dataclass(frozen=True)
class Checked:
    """How far pipelined and unpipelined are apart, and how long one process takes for a step."""

    steps: int
    difference: float  # the largest, over all losses and all parameters
    seconds: float  # of an unpipelined step, with the threads of one rank
    against: str  # what the pipeline was compared with

    def __str__(self) -> str:
        apart = f"{self.difference:.3g}" if self.difference else "0.0"
        return f"pipelined == unpipelined over {self.steps} steps: largest difference {apart}"


@dataclass
class History:
    """The figures of a run, step by step.

    >>> from dataclasses import asdict
    >>> history = History(losses=[2.0, 1.5], seconds=[0.5, 0.5], validation=[(1, 1.8), (2, 1.9)])
    >>> history.speed(rows=8), history.best, history.is_enough(patience=1)
    (16.0, 1.8, True)
    >>> History.from_json(asdict(history)) == history
    True
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)  # how many steps were done, and the loss then
    saving: list[float] = field(default_factory=list)  # seconds that each checkpoint kept the steps waiting
    recoveries: list[Recovery] = field(default_factory=list)
    checked: Checked | None = None  # against the model in one process

    @classmethod
    def from_json(cls, data: dict[str, Value]) -> Self:
        """What was made of a history by `asdict`, and then read from JSON."""
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        known["recoveries"] = [Recovery(**row) for row in known.get("recoveries", ())]
        known["checked"] = Checked(**data["checked"]) if data.get("checked") else None
        return cls(**known)

    def speed(self, rows: int) -> float:
        """How many rows a second the last steps have done."""
        recent = self.seconds[-_RECENT:]
        return rows * len(recent) / max(sum(recent), 1e-9)

    @property
    def best(self) -> float:
        """The lowest validation loss; infinite if there is none."""
        return min(map(_or_infinite, self.validation), default=math.inf)

    def is_enough(self, patience: int) -> bool:
        """Whether none of the last `patience` validations was better than those before them; 0: never."""
        losses = [*map(_or_infinite, self.validation)]
        return bool(patience) and len(losses) > patience and min(losses[-patience:]) >= min(losses[:-patience])


def _or_infinite(point: tuple[int, float]) -> float:
    """A loss to compare with others: one that is no number is worse than any, and not the least of all."""
    return math.inf if math.isnan(point[1]) else point[1]


def note_loss(options: TrainOptions, since: float) -> None:
    """Called where a rank is found to be gone; the first word stands. ``since``: when this life of the run began."""
    with suppress(OSError), (options.folder / LOSS).open("x", encoding="utf-8") as file:
        file.write(json.dumps({"time": last_sign(options.folder, since)}))


def last_sign(folder: Path, since: float) -> float:
    """When each rank was known to live for the last time: now, or when the first of them fell silent. Files of former lives do
    not count."""
    files = [file for where in ("", "replica-*/") for file in folder.glob(f"{where}{FOLDER}/rank-*.json")]
    seen = [time.time()]
    for file in files:
        with suppress(OSError):  # a rank that ends takes its file along
            seen.append(file.stat().st_mtime)
    return min(when for when in seen if when >= since)


def loss_noted(folder: Path) -> float | None:
    """When a rank was lost, if the life before this one ended so; None else. It is told once."""
    file = folder / LOSS
    if not file.is_file():
        return None
    when = read_json(file).get("time")
    file.unlink(missing_ok=True)
    return float(when) if isinstance(when, int | float) else None


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
    """Write down how the model is cut, with the options of the run."""
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
