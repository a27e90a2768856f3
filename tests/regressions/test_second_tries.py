"""A step in which a rank ran out of memory is not done again by itself; what a second call begins from is the caller's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.comm import LocalTransport, LocalWorld
from tests.regressions.plain_loop import MICROBATCHES, WIDTH, batch, difference, gradients, looped, loss_fn

EXACT = 1e-12


class Tight(nn.Module):
    """Runs out of memory once, in its third microbatch, if it is told to."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.left = [3] if fails else []  # calls until it does

    def forward(self, x: Tensor) -> Tensor:
        if self.left:
            self.left[0] -= 1
            if not self.left[0]:
                self.left.clear()
                raise torch.OutOfMemoryError("out of memory, says the test")
        return self.layer(x)


class InPlace(nn.Linear):
    """Changes its input, which is the user's batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(1.5))


class Counting(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


class CountingLoss(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return loss_fn(output, target) * (1 + 0.1 * self.calls)


FIRST: dict[str, Any] = {"batch": InPlace, "attributes": Counting, "loss": nn.Linear, "nothing": nn.Linear}


def stages(kind: str, *, fails: bool) -> list[nn.Module]:
    torch.manual_seed(0)
    return [FIRST[kind](WIDTH, WIDTH).double(), Tight(fails=fails).double()]


@pytest.mark.parametrize("kind", FIRST)
def test_a_step_that_ran_out_of_memory_is_done_again_by_the_caller_alone(kind: str) -> None:
    """A step was done again automatically after OutOfMemory. It began from a batch that the first stage had changed in place,
    from attributes of modules that the first try had changed, and from changed buffers of a loss module: only gradients,
    buffers of stages and random numbers were put back. Now every rank raises, and the caller who begins from the same state
    gets the same numbers under the remedy."""
    modules = stages(kind, fails=True)
    loss: Any = CountingLoss() if kind == "loss" else loss_fn

    def rank(transport: LocalTransport) -> Tensor:
        stage = penstock.PipelineStage(modules[transport.rank], transport.rank, 2, "cpu", group=transport)
        settings: dict[str, Any] = {"schedule": "gpipe", "loss_fn": loss, "microbatches": MICROBATCHES}
        pipe = penstock.Pipeline(stages=[stage], **settings)
        x = batch()
        with pytest.raises(penstock.errors.OutOfMemory) as caught:
            pipe.step(x, target=torch.zeros_like(x))
        if isinstance(modules[0], Counting) and transport.rank == 0:
            assert 0 < modules[0].calls <= MICROBATCHES
            modules[0].calls = 0
        if isinstance(loss, CountingLoss) and transport.rank == 1:
            loss.calls.zero_()
        pipe.zero_grad()
        assert caught.value.remedy is not None
        pipe.run_plan(caught.value.remedy)
        x = batch()
        return torch.tensor(pipe.step(x, target=torch.zeros_like(x)).loss, dtype=torch.float64)

    found = LocalWorld(2).run(rank)[-1]
    fresh: Any = CountingLoss() if kind == "loss" else loss_fn
    *losses, w0, b0, w1, b1 = looped(plain := stages(kind, fails=False), batch(), loss=fresh)
    assert len(gradients(plain)) == 4
    expected = [torch.stack(losses).mean(), w0, b0, w1, b1]
    assert difference([found, *gradients(modules)], expected) < EXACT
