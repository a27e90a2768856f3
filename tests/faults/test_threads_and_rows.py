"""Two threads that step at once, and batches that differ between ranks: refused before anything is computed.

The stories: two threads of one process that called `step` at the same time hung, or raised `KeyError: 0`. A rank that was given
another number of rows than the first one computed a wrong loss, with a warning of torch's about broadcasting as the only sign.
"""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from penstock.comm import LocalWorld, Transport
from penstock.errors import PenstockError, RanksDisagree, RunError
from penstock.run import Schedule1F1B, ScheduleGPipe
from penstock.stage.pipeline_stage import PipelineStage


def test_a_second_thread_is_refused_and_the_first_one_goes_on() -> None:
    entered, leave = threading.Event(), threading.Event()

    class Slow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            entered.set()
            assert leave.wait(60.0)
            return super().forward(x)

    module = Slow(4, 4)
    schedule = ScheduleGPipe(PipelineStage(module, 0, 1, "cpu"), 2, loss_fn=nn.functional.mse_loss)
    x, y = torch.randn(2, 4, 4)
    first = threading.Thread(target=schedule.step, args=(x,), kwargs={"target": y})
    first.start()
    assert entered.wait(60.0)
    with pytest.raises(RunError, match="while another thread of this process"):
        schedule.step(x, target=y)
    with pytest.raises(RunError, match="while another thread of this process"):
        schedule.eval(x)
    leave.set()
    first.join(60.0)
    assert module.weight.grad is not None
    module.zero_grad()
    schedule.step(x, target=y)
    assert module.weight.grad is not None


def test_a_step_inside_a_step_is_refused() -> None:
    module = nn.Linear(4, 4)
    schedule = ScheduleGPipe(PipelineStage(module, 0, 1, "cpu"), 2, loss_fn=nn.functional.mse_loss)
    x, y = torch.randn(2, 4, 4)
    handle = module.register_forward_pre_hook(lambda *_: schedule.eval(x))
    with pytest.raises(RunError, match="or a hook in a step"):
        schedule.step(x, target=y)
    handle.remove()
    schedule.step(x, target=y)


def step_with(transport: Transport, inputs: list[int | None], targets: list[int | None]) -> str:
    """A step in which each rank gives as many rows as stand at its place; what was raised, and whether the next one works."""
    torch.manual_seed(0)
    rank = transport.rank
    schedule = Schedule1F1B(
        PipelineStage(nn.Linear(4, 4), rank, transport.num_ranks, "cpu", group=transport),
        2,
        loss_fn=nn.functional.mse_loss,
    )
    args = [] if inputs[rank] is None else [torch.randn(inputs[rank] or 0, 4)]
    target = None if targets[rank] is None else torch.randn(targets[rank] or 0, 4)
    said = ""
    try:
        schedule.step(*args, target=target)
    except PenstockError as error:
        said = f"{type(error).__name__}: {error}"
    schedule.step(torch.randn(8, 4), target=torch.randn(8, 4))
    return said


@pytest.mark.parametrize(
    ("inputs", "targets", "text"),
    [
        ([8, 8, 4], [8, 8, 8], "rank 2: 4 rows of the input here, 8 there"),
        ([8, 8, 8], [8, 8, 4], "rank 2: 4 rows of the target here, 8 there"),
        ([8, 6, 8], [8, 8, 8], "rank 1: 6 rows of the input here, 8 there"),
        ([8, None, None], [None, None, 6], "rank 2: 6 rows of the target here, 8 rows of the input there"),
    ],
)
def test_batches_that_differ_are_refused_everywhere(
    inputs: list[int | None], targets: list[int | None], text: str
) -> None:
    said = LocalWorld(3).run(step_with, inputs, targets)
    assert all(text in each for each in said), said
    assert any(each.startswith(RanksDisagree.__name__) for each in said)


@pytest.mark.parametrize("targets", [[None, None, 8], [8, 8, 8]])
def test_batches_that_fit_are_accepted(targets: list[int | None]) -> None:
    assert LocalWorld(3).run(step_with, [8, None, None], targets) == ["", "", ""]
