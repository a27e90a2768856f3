"""`penstock train` stopped and resumed is the run that was never stopped, bit by bit.

With all that a run can carry from step to step: fp16 and its scaler, a learning rate with a warm-up, accumulation, Adam's
moments, dropout, and batches that are drawn from torch's own random numbers.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

import penstock
from penstock.errors import PenstockError
from penstock.front.loading import Checkpoint
from penstock.train.rank import run_rank
from penstock.train.train_options import TrainOptions

JOB = """
import gc
import os
import signal
import torch
from torch import nn

STOP_AT = -1
READ = 0  # rows or batches that were read
COLLECTS = []  # whether Python collects whenever it likes, at the second step

def stop_at(number):
    global READ
    READ += 1
    if number == STOP_AT:
        os.kill(os.getpid(), signal.SIGTERM)

class Rows:  # 44 of them, with noise of their own
    def __len__(self):
        return 44
    def __getitem__(self, k):
        stop_at(READ)
        x = torch.linspace(-1, 1, 6) * k / 44 + 0.1 * torch.randn(6)
        return x, x[:3] * 2

class Stream:  # knows its place, as torchdata's loaders do
    def __init__(self):
        self.place = 0
    def __iter__(self):
        if self.place == 5:
            self.place = 0
        while self.place < 5:
            self.place += 1
            stop_at(READ)
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(self.place))
            yield x, x[:, :3] * 2
    def state_dict(self):
        return {"place": self.place}
    def load_state_dict(self, state):
        self.place = state["place"]

def drawn(number):
    stop_at(number)
    if number == 1:
        COLLECTS.append(gc.isenabled())
    x = torch.randn(8, 6)
    return x, x[:, :3] * 2

def made(data):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.2), nn.Tanh(), nn.Linear(12, 3))
    return model, data, nn.functional.mse_loss, lambda p: torch.optim.AdamW(p, lr=0.01)

def build():
    return made(drawn)

def broken():
    model, _, loss, optimizer = made(drawn)
    return model, lambda number: 1 / 0, loss, optimizer

def shuffled():
    return made(torch.utils.data.DataLoader(Rows(), batch_size=8, shuffle=True))

def streamed():
    return made(Stream())

def settled():  # learns nothing, so that no validation is better than the first
    model, data, loss, _ = made(drawn)
    return model, data, loss, lambda p: torch.optim.SGD(p, lr=0.0), [(torch.ones(8, 6), torch.ones(8, 3))]
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


@pytest.mark.parametrize(
    ("kind", "stop_at", "read_again"),
    [("build", 9, 1), ("shuffled", 70, 8 + 32), ("streamed", 9, 1)],
    ids=["function", "DataLoader", "knows its place"],
)
def test_a_resumed_run_is_the_run_that_was_never_stopped(job: str, kind: str, stop_at: int, read_again: int) -> None:
    """Stopped at the second batch of step 4. A loader that does not say where it is has then taken 32 rows of its second pass,
    which are read again; the first batch is read once more in any case, as an example for the pipeline."""
    module = import_module("resuming_job")
    job = f"resuming_job:{kind}"
    torch.manual_seed(5)
    assert run_rank(options(job, "whole"))
    read, module.READ = module.READ, 0
    torch.manual_seed(5)
    module.STOP_AT = stop_at
    assert not run_rank(options(job, "parted"))
    assert len(losses("parted")) == 5
    module.STOP_AT = -1
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
    assert module.READ - read == read_again


def test_a_run_that_ended_early_stays_where_it_was(job: str) -> None:
    """Each time that it was resumed it did one step more, and found then that it had ended."""
    patient = options("resuming_job:settled", "run", validate_every=1, patience=2, accumulate=1)
    assert run_rank(patient)
    assert len(losses("run")) == 3  # the first validation was the best
    assert run_rank(replace(patient, resume=True))
    assert len(losses("run")) == 3
    assert run_rank(replace(patient, resume=True, patience=0, steps=5))
    assert len(losses("run")) == 5


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_start_removes_nothing_that_may_be_the_last_whole_checkpoint(job: str, goes_on: bool) -> None:
    """A kill between the two renames of a save leaves checkpoint.step-N and no checkpoint. A start without --resume deleted it,
    and what an earlier start had put aside was deleted to make room."""
    plain = {"accumulate": 1, "precision": "fp32"}
    for count in (1, 2):
        assert run_rank(options(job, "run", steps=count, **plain))
    assert penstock.load("run/checkpoint.before").extra["step"] == 1
    Path("run/checkpoint").rename("run/checkpoint.step-2")
    if goes_on:
        assert run_rank(options(job, "run", steps=3, resume=True, **plain))
        assert len(losses("run")) == 3
        return
    with pytest.raises(ZeroDivisionError):
        run_rank(options("resuming_job:broken", "run", **plain))
    assert penstock.load("run/checkpoint.before").extra["step"] == 1
    assert penstock.load("run/checkpoint.before-2").extra["step"] == 2
    assert run_rank(options(job, "run", steps=4, **plain))
    assert penstock.load("run/checkpoint").extra["step"] == 4
    names = sorted(path.name for path in Path("run").iterdir() if path.name.startswith("checkpoint"))
    assert names == ["checkpoint", "checkpoint.before-2.step-2"], "the newest of the last earlier run stays"


def test_a_run_that_is_killed_before_it_begins_is_not_the_one_before(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever was started again after a kill went on from what was in the folder; but a rank that is killed early has not put
    aside what an earlier run left there."""
    assert run_rank(options(job, "run", steps=3, accumulate=1))
    Path("run/ranks.json").unlink()  # as the launcher does
    monkeypatch.setenv("PENSTOCK_RESTARTS", "1")
    assert run_rank(options(job, "run", steps=2, accumulate=1))
    assert len(losses("run")) == 2
    assert penstock.load("run/checkpoint.before").extra["step"] == 3
    assert run_rank(options(job, "run", steps=3, accumulate=1)), "it had begun, and goes on"
    assert penstock.load("run/checkpoint.before").extra["step"] == 3


def test_what_goes_by_a_validation_loss_needs_one(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing was said, and nothing was kept. Nor was anything said of options that are the small GPT's."""
    with pytest.raises(PenstockError, match="resuming_job:build brings no batches to validate on"):
        run_rank(options(job, "run", keep_best=True, validate_every=2))
    assert run_rank(options(job, "run", steps=1, learning_rate=0.5, dropout=0.5))
    assert "not used: --dropout, --learning-rate; resuming_job:build makes" in capsys.readouterr().out


def test_the_signal_and_the_collector_are_given_back(job: str) -> None:
    """What the run does with SIGTERM ends with it. While it trains, garbage is collected after steps, on all ranks at once."""
    before = signal.getsignal(signal.SIGTERM)
    assert run_rank(options(job, "run", steps=2, accumulate=1, precision="fp32"))
    assert signal.getsignal(signal.SIGTERM) is before
    assert import_module("resuming_job").COLLECTS == [False]
    gc.collect()
    assert gc.isenabled()
    assert json.loads(Path("run/report.json").read_text())["saving"][0] > 0  # what a checkpoint cost, for the report
    assert os.path.exists("run/report.html")  # noqa: PTH110
