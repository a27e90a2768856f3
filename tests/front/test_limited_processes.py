"""Real processes that the system gives no more memory than a limit: without one argument they fail, with it they train."""

from __future__ import annotations

import ctypes
import gc
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from tests.gloo_pool import GlooPool

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo")]

WIDTH, ROWS, MICROBATCHES, BLOCKS, STEPS = 128, 1024, 16, 8, 2
MB = 1 << 20
LIMIT = 24 * MB
M_MMAP_THRESHOLD = -3  # of mallopt(3)
BESIDE = 8 * MB  # what the processes themselves need meanwhile: pieces between blocks, threads, messages


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def data_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


def train(memory_limit: int | None, budget: int | None) -> dict[str, Any]:
    """Losses of some steps, in a process that may take `budget` bytes more than it has when they begin."""
    ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, 128 << 10)  # what is let go goes back to the system
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    x, y = torch.randn(2, ROWS * MICROBATCHES, WIDTH).unbind()
    options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "example_target": y, "schedule": "gpipe"}
    options |= {"microbatches": MICROBATCHES, "memory_limit": memory_limit, "optimizer_bytes": 0.0}
    pipe = penstock.Pipeline(model, (x,), **options)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    held = [one.planned_peak for one in pipe.memory().ranks]
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    if budget is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + budget, before[1]))
    try:
        losses = []
        for _ in range(STEPS):
            losses.append(pipe.step(x, target=y).loss)
            optimizer.step()
            optimizer.zero_grad()
        return {"losses": losses, "held": held}
    except penstock.errors.OutOfMemory as error:
        return {"failed": str(error), "held": held}
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def test_activations_of_four_times_the_limit_train_under_it_with_one_argument(gloo_pool: GlooPool) -> None:
    free = gloo_pool.run(2, train, None, None)
    assert all(max(one["held"]) > 4 * LIMIT for one in free), "the activations are four times the limit"
    for one in gloo_pool.run(2, train, None, LIMIT + BESIDE):
        assert "ran out of memory in action" in one["failed"]
    for one, other in zip(gloo_pool.run(2, train, LIMIT, LIMIT + BESIDE), free, strict=True):
        assert one.get("losses") == pytest.approx(other["losses"], rel=1e-6), one.get("failed")
