"""Predictions go by what was measured while all ranks are at work, and measuring leaves nothing behind."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from penstock import Pipeline
from penstock.balance import LayerCost, Profile
from penstock.comm import LocalTransport, LocalWorld
from penstock.errors import RunError, StageError
from penstock.front import Choice
from penstock.front.model_profile import typical
from penstock.front.replan import enough
from penstock.lower import lower
from penstock.schedules import get_schedule
from penstock.simulate import Costs, simulate
from penstock.stage.pipeline_stage import PipelineStage
from tests.simulate.test_measured import recorded


def model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)) for _ in range(4)]
    return nn.Sequential(*blocks)


X, Y = torch.randn(8, 8), torch.randn(8, 8)


def pipe_of(transport: LocalTransport, schedule: str) -> Pipeline:
    return Pipeline(
        model(), (X,), loss_fn=nn.functional.mse_loss, schedule=schedule, microbatches=4, group=transport, profile=False
    )


@pytest.mark.parametrize("schedule", ["1f1b", "interleavedzerobubble"])
def test_calibrating_changes_the_prediction_and_nothing_else(schedule: str) -> None:
    def rank(transport: LocalTransport) -> tuple[Choice, list[torch.Tensor], list[torch.Tensor]]:
        states = []
        for calibrates in (False, True):
            torch.manual_seed(transport.rank)
            pipe = pipe_of(transport, schedule)
            if calibrates:
                choice = pipe.calibrate(X, target=Y, rounds=2)
            pipe.step(X, target=Y)
            found = [p.grad for p in pipe.parameters() if p.grad is not None]
            states.append(found + [value.clone() for value in pipe.state_dict().values()])
        assert pipe.choice is choice
        assert pipe.schedule.steps == 1
        return choice, *states

    (choice, plain, calibrated), (other, *_) = LocalWorld(2).run(rank)
    assert len(plain) == len(calibrated) > 8
    assert all(map(torch.equal, plain, calibrated))
    assert choice.calibrated == other.calibrated, "every rank has the same costs"
    assert choice.calibrated is not None
    assert choice.predicted >= choice.timeline.makespan > 0
    assert Choice.loads(choice.dumps()) == choice


def test_steps_that_differ_are_measured_more_often() -> None:
    """Every other step takes three times as long as the ones between."""
    steps = 0

    def uneven(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal steps
        steps += 1
        end = time.thread_time() + (0.01 if steps % 2 else 0.03)
        while time.thread_time() < end:
            pass
        return nn.functional.mse_loss(output, target)

    transport = LocalWorld(1).transports[0]
    pipe = Pipeline(nn.Linear(8, 8), (X,), loss_fn=uneven, microbatches=1, profile=False, group=transport)
    steps = 0
    pipe.calibrate(X, target=Y, rounds=4)
    assert 2 + 4 < steps <= 2 + 3 * 4, "whatever other programs leave of them, the first four that count are not alike"


def test_how_many_steps_are_enough() -> None:
    one = recorded(simulate(lower(get_schedule("1f1b")(2, 2))))
    slow = recorded(simulate(one.plan, Costs.per_rank(num_stages=2, forward=2.0)))
    assert enough([one] * 9 + [slow] * 3, rounds=12)
    assert not enough([one] * 11, rounds=12)
    assert not enough([one, slow] * 6, rounds=12), "they differ"
    taken = replace(one, processor=(one.busy[0], one.busy[1] - 2.0))
    assert taken.kept_waiting == pytest.approx(1.0)
    assert not enough([one] * 11 + [taken] * 6, rounds=12), "other programs had the processors"
    assert enough([one] * 12 + [taken] * 6, rounds=12)


def test_stages_made_by_hand_are_not_calibrated() -> None:
    stage = PipelineStage(nn.Linear(2, 2), 0, 1, "cpu", group=LocalWorld(1).transports[0])
    with pytest.raises(StageError, match="made by hand"):
        Pipeline(stages=[stage], loss_fn=nn.functional.mse_loss).calibrate(X[:, :2], target=Y[:, :2])


def test_the_median_over_the_ranks_counts() -> None:
    layers = (LayerCost("a", 1.0, 2.0, 3.0), LayerCost("b", 2.0, 2.0, 2.0))
    mine = Profile(layers, metadata={"unit": "s", "backward": [5.0, 4.0]})
    slow = replace(
        mine, layers=(replace(layers[0], forward=5.0), layers[1]), metadata={"unit": "s", "backward": [7.0, 4.0]}
    )
    found = typical(mine, [mine, slow, slow])
    assert found.layers[0].forward == 5.0
    assert found.metadata["backward"] == [7.0, 4.0]
    other = replace(mine, layers=(replace(layers[0], name="c"), layers[1]))
    assert typical(mine, [mine, other]) == mine, "another model was measured there: the ranks will disagree about it"


@pytest.mark.parametrize("rounds", [0, -3, 10**30])
def test_as_many_steps_are_measured_as_can_be(rounds: int) -> None:
    pipe = Pipeline(
        nn.Linear(8, 8), (X,), loss_fn=nn.functional.mse_loss, profile=False, group=LocalWorld(1).transports[0]
    )
    with pytest.raises(RunError, match="the number of steps to measure, from 1 to 100,000"):
        pipe.calibrate(X, target=Y, rounds=rounds)
