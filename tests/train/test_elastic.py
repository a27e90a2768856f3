"""A rank is killed: the job goes on by itself with those that are left, from the last checkpoint, as if they had been resumed.

The runs are real commands. What they must equal is the plain loop, step by step, in double precision: a run that
somebody resumes by hand with two ranks equals that too.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import PenstockError
from penstock.train import run_report
from penstock.train.history import LOSS, History, Recovery, last_sign, loss_noted, note_loss
from penstock.train.launch import fitted, spread_over
from penstock.train.train_options import TrainOptions
from tests.gloo_pool import free_port
from tests.train.test_train import ROOT, alive, losses, start, steps_done, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

HELD = 14  # the step at which a job waits until a rank has been killed, however long that takes
JOB = f"""
import time
from pathlib import Path
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(6)])
    def data(step):
        while step == {HELD} and not Path("killed").exists():
            time.sleep(0.02)
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        return (x,), x.flip(1)
    return model, data, nn.functional.mse_loss, lambda p: torch.optim.Adam(p, lr=0.01)
"""
STEPS = 24


def plain_losses() -> list[float]:
    scope: dict[str, Any] = {}
    before = torch.get_default_dtype()
    try:
        exec(JOB.replace(f"step == {HELD}", "False"), scope)
        model, data, loss_fn, make = scope["build"]()
        optimizer, found = make(model.parameters()), []
        for step in range(STEPS):
            (x,), y = data(step)
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found
    finally:
        torch.set_default_dtype(before)


OPTIONS = (
    "--microbatches",
    "4",
    "--steps",
    str(STEPS),
    "--checkpoint-every",
    "4",
    "--no-measure",
    "--check-steps",
    "0",
)


@pytest.mark.xdist_group("own")
def test_a_job_goes_on_with_the_ranks_that_are_left(tmp_path: Path) -> None:
    """Of two replicas of two ranks one remains. That a pipeline gets shorter is shown under torchrun, below."""
    (tmp_path / "elastic_job.py").write_text(JOB)
    folder = tmp_path / "run"
    sizes = ("--ranks", "2", "--dp", "2", "--min-ranks", "2")
    process = start(tmp_path, "elastic_job:build", *sizes, *OPTIONS, "--clip", "0", "-o", "run")
    try:
        wait_for(lambda: (folder / "ranks.json").is_file() and steps_done(folder) >= 9, process)
        first = json.loads((folder / "ranks.json").read_text())
        lived, killed = last_sign(folder, 0.0), time.time()
        os.kill(first[1], signal.SIGKILL)
        (tmp_path / "killed").touch()
        output, _ = process.communicate(timeout=250)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    assert "rank 1 was killed by SIGKILL: starting again with 2 of 4 ranks from the last checkpoint (1 of 3)" in output
    (resumed,) = [int(number) for number in re.findall(r"resumed from step (\d+) ", output)]
    assert resumed >= 4
    assert resumed % 4 == 0
    second = json.loads((folder / "ranks.json").read_text())
    assert len(second) == 2
    assert not any(alive(pid) for pid in first + second)
    assert losses(folder) == pytest.approx(plain_losses(), rel=1e-9)
    report = run_report.read(folder)
    ((lost),) = report["recoveries"]
    assert (lost["step"], lost["ranks"]) == (resumed, 2)
    assert (folder / "ranks.json").stat().st_mtime - killed < lost["seconds"] < time.time() - lived, "from the kill on"
    assert f"from the loss of a rank to the end of step {resumed}, with 2 ranks" in (folder / "report.html").read_text()
    assert not (folder / LOSS).exists()


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def host(folder: Path, port: int, number: int) -> subprocess.Popen[str]:
    """A torchrun as on a host of its own, with one rank; the first one holds the store."""
    torch_run = (
        *("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--monitor-interval", "0.2"),
        *("--rdzv-id", "elastic", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-conf"),
        f"is_host={1 - number},last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=2",
    )
    train = ("elastic_job:build", "--min-ranks", "1", "--stages", "2", *OPTIONS, "--clip", "0", "-o", "run")
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *torch_run, "-m", "penstock", "train", *train],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.xdist_group("own")
@pytest.mark.long("the same under penstock train")
def test_under_torchrun_a_job_goes_on_with_the_hosts_that_are_left(tmp_path: Path) -> None:
    (tmp_path / "elastic_job.py").write_text(JOB)
    folder, port = tmp_path / "run", free_port()
    hosts = [host(tmp_path, port, number) for number in range(2)]
    try:
        wait_for(lambda: (folder / "ranks.json").is_file() and steps_done(folder) >= 9, hosts[0])
        first = json.loads((folder / "ranks.json").read_text())
        assert len(first) == 2
        (gone,) = (pid for pid in first if parent_of(pid) == hosts[1].pid)
        os.killpg(hosts[1].pid, signal.SIGKILL)
        os.kill(gone, signal.SIGKILL)
        (tmp_path / "killed").touch()
        output, _ = hosts[0].communicate(timeout=200)
    finally:
        for each in hosts:
            with suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()
            assert each.stdout is not None
            each.stdout.close()
    assert hosts[0].returncode == 0, output
    assert not alive(gone)
    assert f"rank {first.index(gone)} failed" in output
    (resumed,) = [int(number) for number in re.findall(r"resumed from step (\d+) ", output)]
    assert len(json.loads((folder / "ranks.json").read_text())) == 1
    assert losses(folder) == pytest.approx(plain_losses(), rel=1e-9)
    ((lost),) = run_report.read(folder)["recoveries"]
    assert (lost["step"], lost["ranks"]) == (resumed, 1)


def test_fewer_than_the_least_is_the_end() -> None:
    with pytest.raises(PenstockError, match="1 ranks are left, and --min-ranks 2"):
        fitted(TrainOptions(ranks=3, min_ranks=2), 1)


def test_stages_that_no_longer_fit_are_chosen_anew() -> None:
    assert fitted(TrainOptions(ranks=3, stages=6, min_ranks=2), 2).stages == 6
    assert fitted(TrainOptions(ranks=3, stages=3, min_ranks=2), 2).stages is None
    assert fitted(TrainOptions(ranks=3, stages=3), 2).stages == 3, "nobody asked for it: the error of the cut says so"


def test_replicas_are_given_up_before_pipelines_get_too_short() -> None:
    four = TrainOptions(ranks=4, dp=2, min_ranks=3)
    assert [spread_over(four, left) for left in (8, 7, 6, 5, 3, 2)] == [(2, 4), (2, 3), (2, 3), (1, 4), (1, 3), (0, 0)]
    assert spread_over(TrainOptions(ranks=1, dp=3, min_ranks=1), 2) == (1, 1), (
        "two replicas would not share rows evenly"
    )
    for left in (7, 5, 3):  # what the launcher starts is what the ranks make of their number
        replicas, each = spread_over(four, left)
        assert fitted(four, replicas * each).dp == replicas
    assert fitted(replace(four, stages=4), 6).stages is None


def test_the_first_word_on_a_loss_stands_and_is_told_once(tmp_path: Path) -> None:
    options = TrainOptions(output=str(tmp_path))
    now = time.time()
    for place, age in {"top/rank-0": 0.0, "top/rank-1": 7.0, "replica-1/top/rank-0": 1.0, "top/rank-2": 90.0}.items():
        file = tmp_path / f"{place}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        os.utime(file, (now - age, now - age))
    note_loss(options, now - 60.0)
    note_loss(options, now)
    assert loss_noted(tmp_path) == pytest.approx(now - 7.0, abs=1e-3), "rank 1 was silent; rank 2 is of a former life"
    assert loss_noted(tmp_path) is None
    note_loss(TrainOptions(output=str(tmp_path / "not there")), now)


def test_recoveries_go_through_json() -> None:
    found = [Recovery(8, 2.5, 2)]
    history = History(recoveries=found)
    assert History.from_json(json.loads(json.dumps(asdict(history)))) == history
    assert str(found[0]) == "a rank was lost; step 8 was done 2.5 s later, on 2 ranks"
