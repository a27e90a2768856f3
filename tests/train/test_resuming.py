"""`penstock train` stopped and resumed is the run that was never stopped, bit by bit.

With all that a run can carry from step to step: fp16 and its scaler, a learning rate with a warm-up, accumulation, Adam's
moments, dropout, and batches that are drawn from torch's own random numbers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

import penstock
from penstock.front.loading import Checkpoint
from penstock.train.rank import run_rank
from penstock.train.train_options import TrainOptions

JOB = """
import os
import signal
import torch
from torch import nn

STOP_AT = -1

def build():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.2), nn.Tanh(), nn.Linear(12, 3))
    def data(number):
        if number == STOP_AT:
            os.kill(os.getpid(), signal.SIGTERM)
        x = torch.randn(8, 6)
        return x, x[:, :3] * 2
    return model, data, nn.functional.mse_loss, lambda p: torch.optim.AdamW(p, lr=0.01)
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "resuming_job.py").write_text(JOB)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    sys.modules.pop("resuming_job", None)
    return "resuming_job:build"


def options(job: str, folder: str, **more: object) -> TrainOptions:
    settings = {
        "build": job, "ranks": 1, "schedule": "1f1b", "microbatches": 4, "steps": 10, "output": folder, "precision": "fp16",
        "rate_schedule": "cosine", "warmup": 3, "accumulate": 2, "check_steps": 0, "measure": False, "checkpoint_every": 100,
        "validate_every": 0, "threads": 1,
    }  # fmt: skip
    return TrainOptions(**{**settings, **more})  # type: ignore[arg-type]


def losses(folder: str) -> list[float]:
    return [json.loads(line)["loss"] for line in (Path(folder) / "log.jsonl").read_text().splitlines()]


def states(folder: str) -> tuple[Checkpoint, dict[str, object]]:
    held = json.loads((Path(folder) / "checkpoint" / "rank-0.json").read_text())
    return penstock.load(Path(folder) / "checkpoint"), {name: held[name] for name in ("scaler", "random")}


def test_a_resumed_run_is_the_run_that_was_never_stopped(job: str) -> None:
    from importlib import import_module

    torch.manual_seed(5)
    assert run_rank(options(job, "whole"))
    torch.manual_seed(5)
    import_module("resuming_job").STOP_AT = 9  # the second batch of step 4
    assert not run_rank(options(job, "parted"))
    assert len(losses("parted")) == 5
    torch.manual_seed(77)
    assert run_rank(options(job, "parted", resume=True))
    assert losses("parted") == losses("whole")
    (one, of_one), (other, of_other) = states("whole"), states("parted")
    assert of_one == of_other, "scaler and random numbers"
    assert one.step == other.step == 20
    assert one.model.keys() == other.model.keys()
    assert all(torch.equal(value, other.model[name]) for name, value in one.model.items())
    for name, held in one.optimizer.items():
        assert all(
            torch.equal(torch.as_tensor(value), torch.as_tensor(other.optimizer[name][key]))
            for key, value in held.items()
        )
    assert one.param_groups == other.param_groups, "the learning rate"
    assert "scaler" in of_one


def test_the_signal_is_given_back(job: str) -> None:
    """What the run does with SIGTERM ends with it."""
    before = signal.getsignal(signal.SIGTERM)
    assert run_rank(options(job, "run", steps=1, precision="fp32"))
    assert signal.getsignal(signal.SIGTERM) is before
    assert os.path.exists("run/report.html")  # noqa: PTH110
