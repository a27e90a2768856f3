"""A rank that is slow for good gets fewer layers at the next checkpoint, and the losses go on as they would have."""

from __future__ import annotations

import copy
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipeline
from penstock.comm import LocalTransport, LocalWorld
from penstock.errors import StageError
from penstock.stage.pipeline_stage import PipelineStage

LAYERS = 8
_HERE = threading.local()  # `slow`: how many times as long the rank of this thread takes


@torch.library.custom_op("penstock_recut::work", mutates_args=())
def work(x: Tensor) -> Tensor:
    time.sleep(0.001 * getattr(_HERE, "slow", 1.0))  # time is the subject
    return x.clone()


@work.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


work.register_autograd(lambda _, grad: work(grad))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = work(torch.tanh(self.linear(x)))
        return found


torch.manual_seed(0)
MODEL = nn.Sequential(*(Layer() for _ in range(LAYERS)))
X, Y = torch.randn(8, 4), torch.randn(8, 4)


def made(transport: LocalTransport, profile: Any) -> tuple[Pipeline, torch.optim.Optimizer]:
    pipe = Pipeline(
        copy.deepcopy(MODEL), (X,), loss_fn=nn.functional.mse_loss, schedule="1f1b", microbatches=4, profile=profile,
        group=transport,
    )  # fmt: skip
    return pipe, torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)


def trained(transport: LocalTransport, folder: Path, slow: float, gain: float) -> tuple[list[float | None], list[int]]:
    """Some steps, a checkpoint at which the cut may change, and some more; how many layers this rank has in each."""
    _HERE.slow = slow if transport.rank == 1 else 1.0
    pipe, optimizer = made(transport, False)
    losses, layers, timelines = [], [], []
    for step in range(6):
        with pipe.record() as recording:
            losses.append(pipe.step(X, target=Y).loss)
        timelines.append(recording.timeline)
        optimizer.step()
        optimizer.zero_grad()
        layers.append(sum(name.endswith("weight") for name, _ in pipe.named_parameters()))
        if step == 2:
            profile = pipe.recut(timelines, gain=gain)
            if profile is not None:
                pipe.save(folder, optimizer=optimizer)
                pipe, optimizer = made(transport, profile)
                pipe.load(folder, optimizer=optimizer)
    return losses, layers


@pytest.mark.long(
    "a busy machine makes equal ranks unequal; checkpoints into other cuts and cuts by unequal ranks have tests"
)
def test_a_slow_rank_gets_fewer_layers_and_the_losses_go_on(tmp_path: Path) -> None:
    even = LocalWorld(2).run(trained, tmp_path / "even", 1.0, 0.25)
    assert even[1][1] == [LAYERS // 2] * 6, "nobody is slow"
    slow = LocalWorld(2).run(trained, tmp_path / "slow", 4.0, 0.25)
    assert slow[1][1][:3] == [LAYERS // 2] * 3
    assert slow[1][1][-1] <= 2, "the slow rank has at most two layers of eight"
    assert slow[0][1][-1] + slow[1][1][-1] == LAYERS
    assert slow[0][0] == even[0][0], "the very same losses"


def test_what_is_not_worth_it_stays(tmp_path: Path) -> None:
    slow = LocalWorld(2).run(trained, tmp_path / "slow", 4.0, 0.9)
    assert slow[1][1] == [LAYERS // 2] * 6


def test_stages_made_by_hand_cannot_be_cut_anew() -> None:
    stage = PipelineStage(nn.Linear(2, 2), 0, 1, "cpu", group=LocalWorld(1).transports[0])
    with pytest.raises(StageError, match="made by hand"):
        Pipeline(stages=[stage], loss_fn=nn.functional.mse_loss).recut([])
