"""Pipeline(recompute=..., offload=...): what they ask for is in the plan that everything is reckoned with."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock import Pipeline
from penstock.balance import Profile
from penstock.comm import LocalTransport, LocalWorld
from penstock.errors import PlanError, StageError
from penstock.plan import Op
from penstock.run import Schedule
from penstock.schedules import get_schedule
from tests.run.pipes import make_modules, stages_for

X, Y = torch.ones(8, 4), torch.zeros(8, 4)


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(2) for layer in (nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4))))


@cache
def measured() -> Profile:
    """Once for all pipelines, so that all are cut at the same places."""
    return penstock.profile(make(), (X[:2],), loss_fn=nn.functional.mse_loss, target=Y[:2])


def on_ranks(body: Any, **options: Any) -> list[Any]:
    settings = {"schedule": "gpipe", "microbatches": 4, "profile": measured(), **options}

    def rank(transport: LocalTransport) -> Any:
        return body(Pipeline(make(), (X,), loss_fn=nn.functional.mse_loss, group=transport, **settings))

    return LocalWorld(2, rendezvous=True).run(rank)


def looked_at(pipe: Pipeline) -> Any:
    assert pipe.choice is not None
    assert pipe.choice.plan == pipe.plan
    memory = pipe.memory()
    assert [round(peak) for peak in pipe.choice.timeline.peak_memory] == [one.planned_peak for one in memory.ranks]
    loss = pipe.step(X, target=Y).loss
    few = pipe.evaluate(X[:2], target=Y[:2]).loss  # fewer rows than microbatches: a plan of its own
    calibrated = pipe.calibrate(X, target=Y, rounds=1)
    assert calibrated.plan == pipe.plan
    return pipe.profile, pipe.plan, loss, few, [one.planned_peak for one in memory.ranks]


@pytest.mark.parametrize(
    ("options", "op"),
    [({"recompute": True}, Op.R), ({"recompute": {0: [1, 2]}}, Op.R), ({"offload": "disk"}, Op.O)],
)
def test_the_choice_has_the_plan_that_is_run(options: dict[str, Any], op: Op, tmp_path: Path) -> None:
    if "offload" in options:
        options = {**options, "offload_to": tmp_path}
    plain = on_ranks(looked_at)
    found = on_ranks(looked_at, profile=plain[0][0], **options)  # the same costs, so the same stages
    for (_, before, loss, few, held), (_, plan, same, again, holds) in zip(plain, found, strict=True):
        assert plan.has(op)
        assert not before.has(op)
        assert (loss, few) == (same, again)
        # Tensors as small as these are not moved away.
        assert holds[0] < held[0] or op is Op.O, "the first rank holds less, and the plan knows"


def test_words_for_the_place(tmp_path: Path) -> None:
    plan = get_schedule("gpipe")(1, 4)
    stages = stages_for(plan, LocalWorld(1).transports[0], make_modules(1))
    every = Schedule.from_plan(plan, stages, offload=True).plan
    assert Schedule.from_plan(plan, stages, offload="host").plan == every != plan
    assert Schedule.from_plan(plan, stages, offload="disk", offload_to=tmp_path).plan == every


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"offload": "disk"}, "without a folder; expected offload_to="),
        ({"offload": "host", "offload_to": "folder"}, "offload=.host. and offload_to=.folder."),
        ({"offload": "tape"}, "offload=.tape.; expected .host., .disk., True"),
        ({"recompute": "all"}, "recompute=.all.; expected True"),
        ({"offload": True, "offload_to": ""}, "offload_to=..; expected the name of a folder"),
    ],
)
def test_words_that_say_nothing(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Pipeline(nn.Linear(4, 4), (X,), **options)
    plan = get_schedule("gpipe")(1, 4)
    stages = stages_for(plan, LocalWorld(1).transports[0], make_modules(1))
    with pytest.raises(PlanError, match=words):
        Schedule.from_plan(plan, stages, **options)


def test_a_run_folder_has_a_name() -> None:
    with pytest.raises(StageError, match=r"run_folder=..; expected the name of a folder"):
        Pipeline(nn.Linear(4, 4), (X,), run_folder="")
