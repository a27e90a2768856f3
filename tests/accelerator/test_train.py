"""`penstock train --device` on the simulated accelerator: one rank of it in each process, from its command line to its report."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from penstock.train import run_report
from tests.accelerator import pipes
from tests.accelerator.pool import SimPool
from tests.gloo_pool import free_port

OPTIONS = ("--microbatches", "2", "--schedule", "1f1b", "--no-measure", "--checkpoint-every", "2", "--sample", "0")


def commands(device: torch.device, folder: str, port: int, calls: list[tuple[str, ...]]) -> list[tuple[int, str, int]]:
    """What each command of this rank ended with and printed, and the device that it computed on."""
    from penstock.cli.main import main

    rank = dist.get_rank()
    dist.destroy_process_group()
    pipes.simulation(device).reset()
    ours = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1"}
    found = []
    for number, options in enumerate(calls):
        os.environ |= {name: str(value) for name, value in (ours | {"MASTER_PORT": port + number}).items()}
        try:
            arguments = [
                "train",
                "tests.accelerator.train_job:build",
                "--device",
                "sim",
                "--backend",
                "strict",
                "-o",
                folder,
            ]
            done = CliRunner().invoke(main, [*arguments, *OPTIONS, *options], catch_exceptions=False)
        finally:
            for name in (*ours, "MASTER_PORT"):
                os.environ.pop(name)
        found.append((done.exit_code, done.output, torch.accelerator.current_device_index()))
    assert pipes.simulation(device).violations() == []
    torch.accelerator.set_device_index(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # which the pool takes down
    return found


def test_a_command_trains_on_the_device_goes_on_and_reports(sim: SimPool, tmp_path: Path) -> None:
    """Each rank takes the device of its LOCAL_RANK. The device has no statistics of its memory, and the report does without."""
    calls = [("--steps", "3", "--check-steps", "2", "--log", "jsonl"), ("--steps", "5", "--resume")]
    told = sim.run(2, "lazy", commands, str(tmp_path), free_port(), calls)
    for rank, found in enumerate(told):
        assert [(code, device) for code, _, device in found] == [(0, rank)] * 2, found
    first, second = (output for _, output, _ in told[0])
    assert "pipelined == unpipelined over 2 steps" in first
    assert "resumed from step 3" in second
    report = run_report.read(tmp_path)
    assert len(report["losses"]) == 5
    assert report["losses"][-1] < report["losses"][0]
    assert (tmp_path / "report.html").is_file()
    assert [peak > 0 for peak in report["memory"]] == [True, True]
    expected = pytest.approx(plain_losses(5), rel=1e-5)
    assert report["losses"] == expected


def plain_losses(steps: int) -> list[float]:
    from tests.accelerator.train_job import build

    model, data, loss_fn, make = build()
    optimizer, found = make(model.parameters()), []
    for step in range(steps):
        (x,), y = data(step)
        loss = loss_fn(model(x), y)
        loss.backward()
        nn_clip(model)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def nn_clip(model: torch.nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
