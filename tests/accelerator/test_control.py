"""torch's own schedules on the simulated accelerator: the control for the simulation. They are known to run on NCCL."""

from __future__ import annotations

import pytest
import torch

from tests.accelerator import pipes
from tests.accelerator.pool import Mode, SimPool

SCHEDULES = {
    "ScheduleGPipe": 1,
    "Schedule1F1B": 1,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleLoopedBFS": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
    "ScheduleDualPipeV": 2,
}


@pytest.mark.parametrize("mode", ["lazy", "eager"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_torchs_schedules_train(accelerator: SimPool, ranks: int, mode: Mode) -> None:
    microbatches = 2 * ranks
    told = accelerator.run(ranks, mode, all_schedules, microbatches)
    for name, per_rank in SCHEDULES.items():
        everyone = [by_name[name] for by_name in told]
        expected = pipes.expected(ranks * per_rank, microbatches)
        grads = {key: grad for trained in everyone for key, grad in trained.grads.items()}
        assert grads.keys() == expected.keys()
        for key, grad in expected.items():
            torch.testing.assert_close(grads[key], grad, msg=f"{name}: {key}")
        assert [trained.waits for trained in everyone] == [[]] * ranks, name


def all_schedules(device: torch.device, microbatches: int) -> dict[str, pipes.Trained]:
    return {
        name: pipes.train_torch(device, name, per_rank, microbatches, steps=2) for name, per_rank in SCHEDULES.items()
    }
