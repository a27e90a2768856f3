"""A run of `penstock train --device` on the simulated accelerator."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from tests.accelerator import pipes
from tests.accelerator.pool import SimPool


def trains(device: torch.device, folder: str) -> tuple[set[str], list[float], float | None, list[str]]:
    """Some steps of the small GPT, after the check against the unpipelined model; then it is stopped."""
    from penstock.train.loop import Run, Stop
    from penstock.train.screen import Screen
    from penstock.train.train_job import make_job
    from penstock.train.train_options import TrainOptions

    options = TrainOptions(
        steps=2,
        size="tiny",
        batch=4,
        microbatches=2,
        schedule="1f1b",
        measure=False,
        check_steps=2,
        output=folder,
        device=device.type,
        backend="strict",
    )
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": "2", "LOCAL_RANK": str(device.index)}
    try:
        stop = Stop()
        stop.asked = True  # after the first step: what comes after the last one asks the device for its memory
        # AdamW's first step has the sign of a gradient, which is noise where the gradient is.
        job = replace(make_job(options), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), rate=None)
        run = Run(options, job, Screen(enabled=dist.get_rank() == 0), stop)
        run.train()
        places = {parameter.device.type for parameter in run.pipe.parameters()}
        difference = None if run.checked is None else run.checked.difference
        return places, run.losses, difference, pipes.simulation(device).violations()
    finally:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[name]


def test_a_run_trains_on_the_device_as_the_unpipelined_model(sim: SimPool, tmp_path: Path) -> None:
    for places, losses, difference, violations in sim.run(2, "eager", trains, str(tmp_path)):
        assert places == {"sim"}
        assert 4.0 < losses[0] < 7.0  # about the logarithm of 256 bytes
        assert difference is not None
        assert difference < 1e-5
        assert violations == []
    assert (tmp_path / "checkpoint").is_dir()
