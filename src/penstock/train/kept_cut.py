"""How a run's model is cut, kept in its folder: a run that goes on is cut as it was."""

from __future__ import annotations

import json

from penstock.balance import Profile
from penstock.front import Pipeline
from penstock.train.train_options import OPTIONS, TrainOptions, read_json

CHOICE, PROFILE = "choice.json", "profile.json"


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
