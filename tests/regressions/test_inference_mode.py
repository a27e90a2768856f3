"""Pipelines, models and examples that were made under torch.inference_mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.stage.pipeline_stage import PipelineStage

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def captured(group: penstock.comm.LocalTransport, *, example: Tensor = X[:2]) -> penstock.Pipeline:
    return penstock.Pipeline(
        model(), example=(example,), loss_fn=nn.MSELoss(), microbatches=2, profile=False, group=group
    )


def by_hand(group: penstock.comm.LocalTransport) -> penstock.Pipeline:
    stage = PipelineStage(model()[group.rank * 2], group.rank, 2, "cpu", group=group)
    return penstock.Pipeline(stages=[stage], loss_fn=nn.MSELoss(), microbatches=2, group=group)


def of_inference_parameters(group: penstock.comm.LocalTransport) -> penstock.Pipeline:
    with torch.inference_mode():
        made = model()
    return penstock.Pipeline(made, example=(X[:2],), loss_fn=nn.MSELoss(), microbatches=2, profile=False, group=group)


def with_inference_example(group: penstock.comm.LocalTransport) -> penstock.Pipeline:
    with torch.inference_mode():
        example = X[:2] + 1
    return captured(group, example=example)


def under_the_mode(build: Callable[..., penstock.Pipeline]) -> Callable[..., penstock.Pipeline]:
    def made(group: penstock.comm.LocalTransport) -> penstock.Pipeline:
        with torch.inference_mode(group.rank == 1):  # one rank alone: the others hear of it
            return build(group)

    return made


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (under_the_mode(captured), r"a pipeline is built under torch.inference_mode\(\)"),
        (under_the_mode(by_hand), r"a pipeline is built under torch.inference_mode\(\)"),
        (of_inference_parameters, r"0.weight of Sequential was made under torch.inference_mode\(\)"),
        (with_inference_example, r"the example holds a tensor that was made under torch.inference_mode\(\)"),
    ],
)
def test_refused_when_built(build: Callable[..., penstock.Pipeline], said: str) -> None:
    """A pipeline that was built under the mode failed in its first action, with `Inference tensors do not track version counter`,
    or only when it was evaluated, in a trace."""
    world = penstock.LocalWorld(2)
    with pytest.raises(penstock.errors.PenstockError, match=said):
        world.run(build)
    assert all(said.partition(" torch")[0] in str(error) for error in world.errors)


def test_capture_under_the_mode() -> None:
    """The same for `penstock.pipeline`, which makes stages without a Pipeline."""
    with (
        torch.inference_mode(),
        pytest.raises(penstock.errors.PenstockError, match=r"built under torch\.inference_mode"),
    ):
        penstock.pipeline(model(), (X,), num_stages=2)


def test_evaluated_under_the_mode() -> None:
    """What the error proposes: evaluate under the mode, also with sizes that are traced then, and train on afterwards."""

    def rank(group: penstock.comm.LocalTransport) -> list[float]:
        pipe, few = captured(group), X[:2]
        with torch.inference_mode():
            evaluated = pipe.evaluate(few, target=torch.zeros_like(few)).loss
        return [evaluated, pipe.step(few, target=torch.zeros_like(few)).loss]

    expected = nn.functional.mse_loss(model()(X[:2]), torch.zeros(2, 8)).item()
    for losses in penstock.LocalWorld(2).run(rank):
        assert losses == pytest.approx([expected, expected], rel=1e-6)
