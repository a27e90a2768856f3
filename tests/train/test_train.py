"""`penstock train` as people run it: real commands, real processes, small sizes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.front import Choice
from penstock.front.build import Request, cut
from penstock.train.check import Unpipelined
from penstock.train.job import make_job
from penstock.train.options import TrainOptions
from penstock.train.report import read

ROOT = Path(__file__).resolve().parents[2]
SIZES = ("--size", "tiny", "--batch", "8", "--microbatches", "4", "--steps", "24", "--checkpoint-every", "5")
CHECKED = ("--dropout", "0.1", "--no-measure", "--schedule", "1f1b", "--validate-every", "12", "--sample", "8")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


def start(folder: Path, *arguments: str, command: str = "train") -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        environment.pop(name, None)
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", command, *arguments],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(folder: Path, *arguments: str, command: str = "train", code: int = 0) -> str:
    process = start(folder, *arguments, command=command)
    try:
        output, _ = process.communicate(timeout=200)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == code, output
    return output


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 150
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def steps_done(folder: Path) -> int:
    log = folder / "log.jsonl"
    return len(log.read_text().splitlines()) if log.is_file() else 0


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0]
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run that nothing disturbed, with dropout."""
    place = tmp_path_factory.mktemp("train")
    output = run(place, *SIZES, *CHECKED, "-o", "run")
    return place / "run", output


@pytest.mark.xdist_group("train")
def test_the_loss_goes_down_and_the_run_says_what_it_does(finished: tuple[Path, str]) -> None:
    folder, output = finished
    found = losses(folder)
    assert len(found) == 24
    assert sum(found[-4:]) / 4 < found[0] - 0.5
    assert "pipelined == unpipelined over 3 steps: largest difference 0.0\n" in output
    for words in (
        "stages on 2 ranks",
        "tokens/s",
        "validation loss",
        "sample:",
        f"report: {Path('run') / 'report.html'}",
    ):
        assert words in output
    assert (folder / "report.html").stat().st_size > 10_000


@pytest.mark.xdist_group("train")
def test_equals_the_unpipelined_run_step_by_step_with_dropout(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    options = TrainOptions.loads((folder / "options.json").read_text())
    job = make_job(options)
    choice = Choice.loads(read(folder)["choice"])
    args, _ = job.batch(0)
    request: Any = Request(job.model, args, {}, None, None, "1f1b", 4, None, None, None, False)
    plain = Unpipelined(job, job.model, 4, whole=cut(request, choice), seed=options.seed)
    expected = [plain.step(step, job.batch(step)) for step in range(options.steps)]
    assert losses(folder) == pytest.approx(expected, rel=1e-6)
    saved = penstock.load(folder / "checkpoint").model
    for name, value in job.model.state_dict().items():
        torch.testing.assert_close(saved[name], value)


@pytest.mark.xdist_group("train")
def test_ctrl_c_stops_with_a_checkpoint_and_resume_goes_on_as_if_nothing_happened(
    finished: tuple[Path, str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = start(tmp_path, *SIZES, *CHECKED, "-o", "run", "--check-steps", "0")
    wait_for(lambda: steps_done(folder) >= 7, process)
    pids = json.loads((folder / "ranks.json").read_text())
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "the run goes on with: penstock train --resume" in output
    assert not any(alive(pid) for pid in pids)
    stopped = steps_done(folder)
    assert 7 <= stopped < 24
    assert penstock.load(folder / "checkpoint").extra["step"] == stopped
    output = run(tmp_path, *SIZES, *CHECKED, "-o", "run", "--resume")
    assert f"resumed from step {stopped}" in output
    assert losses(folder) == losses(finished[0])


@pytest.mark.xdist_group("train")
def test_a_killed_rank_is_started_again_from_the_last_checkpoint(finished: tuple[Path, str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(tmp_path, *SIZES, *CHECKED, "-o", "run", "--check-steps", "0")
    wait_for(lambda: steps_done(folder) >= 8, process)
    first = json.loads((folder / "ranks.json").read_text())
    os.kill(first[1], signal.SIGKILL)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    assert "resumed from step 5" in output or "resumed from step 10" in output
    assert losses(folder) == losses(finished[0])
    second = json.loads((folder / "ranks.json").read_text())
    assert not set(first) & set(second)
    assert not any(alive(pid) for pid in first + second)


JOB = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.randn(8, 4)
    data = [(x, x[:, :2].contiguous()), (-x, -x[:, :2].contiguous())]
    return model, data, nn.functional.mse_loss, lambda parameters: torch.optim.SGD(parameters, lr=0.1), data
"""


@pytest.mark.xdist_group("train")
def test_a_model_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "my_module.py").write_text(JOB)
    options = ("--steps", "6", "--microbatches", "2", "--ranks", "2", "--validate-every", "3", "-o", "run")
    output = run(tmp_path, "my_module:build", *options)
    assert "Sequential of" in output
    assert "largest difference" in output
    found = losses(tmp_path / "run")
    assert found[-1] < found[0]
    output = run(tmp_path, "--from", "run", command="compare")
    assert "1f1b" in output
    (tmp_path / "run" / "report.html").unlink()
    assert run(tmp_path, "run", command="report").strip() == str(Path("run") / "report.html")
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.xdist_group("train")
def test_what_cannot_be_trained_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def build():\n    return 1\n")
    output = run(tmp_path, "broken:build", "--ranks", "1", "--max-restarts", "0", code=1)
    assert "expected (model, data, loss, optimizer)" in output
    assert "rank 0 ended with exit code 1" in output
    output = run(tmp_path, ".", command="report", code=1)
    assert "has no report.json" in output
