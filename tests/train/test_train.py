"""`penstock train` as people run it: real commands, real processes, small sizes."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import penstock
from penstock.cli.main import main
from penstock.errors import PenstockError
from penstock.front import Choice
from penstock.front.build import cut
from penstock.front.pipeline_options import CutOptions, ModelOptions, Request
from penstock.train.run_report import read
from penstock.train.train_job import Job, batches_of, make_job
from penstock.train.train_options import OPTIONS, TrainOptions
from penstock.train.update import Unpipelined, Update
from tests.gloo_pool import GlooPool, as_torchrun, free_port

ROOT = Path(__file__).resolve().parents[2]
SIZES = ("--size", "tiny", "--batch", "8", "--microbatches", "4", "--steps", "24", "--checkpoint-every", "5")
CHECKED = ("--dropout", "0.1", "--no-measure", "--schedule", "1f1b", "--validate-every", "12", "--sample", "8")
HELD_JOB = """
import os, signal, time
from dataclasses import replace
from pathlib import Path
from penstock.train.train_job import make_job

def held(options, number, wait):
    job = make_job(replace(options, build=None))
    def batch(step):
        if step == number:
            wait()
        return job.batch(step)
    return replace(job, batch=batch)

def until_stopped(options):
    handler, heard = signal.getsignal(signal.SIGINT), []
    def hear(*given):
        heard.append(given)
        handler(*given)
    signal.signal(signal.SIGINT, hear)
    def wait():
        while not heard:
            time.sleep(0.02)
    return held(options, 7, wait)

def until_killed(options):
    def wait():
        while os.environ["RANK"] == "1" and not Path("killed").exists():
            time.sleep(0.02)
    return held(options, 12, wait)
"""  # the small GPT, at a step of which a signal surely comes, however slow the machine is: the whole run takes a second
pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        environment.pop(name, None)
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", "train", *arguments],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(folder: Path, *arguments: str, code: int = 0) -> str:
    process = start(folder, *arguments)
    try:
        output, _ = process.communicate(timeout=200)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == code, output
    return output


def be_rank(arguments: list[str], folder: str, port: int) -> str:
    with as_torchrun(port) as printed, chdir(folder):
        main(["train", *arguments], standalone_mode=False)
        for name in [name for name, module in sys.modules.items() if is_in(module, folder)]:
            del sys.modules[name]  # the next job may have the same name
        gc.collect()  # which a run has put off
    return printed.getvalue()


def is_in(module: object, folder: str) -> bool:
    return str(getattr(module, "__file__", None) or "").startswith(folder)


def under_torchrun(pool: GlooPool, ranks: int, folder: Path, *arguments: str) -> str:
    """What `torchrun -m penstock train ARGUMENTS` says, in processes that are there already."""
    output: str = pool.run(ranks, be_rank, list(arguments), str(folder), free_port(), timeout=200.0)[0]
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


def once(
    factory: pytest.TempPathFactory, name: str, make: Callable[[Path], dict[str, Any]]
) -> tuple[Path, dict[str, Any]]:
    """A folder that `make` fills, once for all workers of pytest-xdist, and what it said of it."""
    shared = factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        shared = shared.parent
    place, facts = shared / name, shared / name / "facts.json"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not facts.is_file():
            shutil.rmtree(place, ignore_errors=True)  # of a try that failed
            place.mkdir()
            facts.write_text(json.dumps(make(place)))
    return place, json.loads(facts.read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run that nothing disturbed, with dropout."""
    place, facts = once(
        tmp_path_factory, "finished", lambda place: {"output": run(place, *SIZES, *CHECKED, "-o", "run")}
    )
    return place / "run", facts["output"]


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
    options = TrainOptions.of_file(folder / "options.json")
    job = make_job(options)
    choice = Choice.loads(read(folder)["choice"])
    args, _ = job.batch(0)
    request = Request(job.model, args, None, "1f1b", 4, ModelOptions(), CutOptions(profile=False))
    update = Update(options, job)
    plain = Unpipelined(update, job.model, range(4), whole=cut(request, choice))
    expected = update.first_losses(plain, options.steps)
    assert losses(folder) == pytest.approx(expected, rel=1e-6)
    saved = penstock.load(folder / "checkpoint").model
    for name, value in job.model.state_dict().items():
        torch.testing.assert_close(saved[name], value)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, list[int]]:
    """The same run, stopped by Ctrl-C in the middle: its folder, what it said, and its processes."""

    def interrupt(place: Path) -> dict[str, Any]:
        (place / "held.py").write_text(HELD_JOB)
        process = start(place, "held:until_stopped", *SIZES, *CHECKED, "-o", "run", "--check-steps", "0")
        wait_for(lambda: steps_done(place / "run") >= 7, process)
        pids = json.loads((place / "run" / "ranks.json").read_text())
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=180)
        assert process.returncode == 130, output
        return {"output": output, "pids": pids}

    place, facts = once(tmp_path_factory, "stopped", interrupt)
    return place / "run", facts["output"], facts["pids"]


@pytest.mark.xdist_group("train")
def test_ctrl_c_stops_all_ranks_with_a_checkpoint(stopped: tuple[Path, str, list[int]]) -> None:
    folder, output, pids = stopped
    done = steps_done(folder)
    assert f"stopped after step {done}; the run goes on with: penstock train --resume" in output
    assert "stopped by SIGINT; all processes have ended" in output
    assert not any(alive(pid) for pid in pids)
    assert done in (7, 8), "it came before the held step, or in it"
    assert penstock.load(folder / "checkpoint").extra["step"] == done


@pytest.mark.xdist_group("train")
def test_resumed_and_then_killed_in_mid_step_it_ends_as_if_nothing_had_happened(
    finished: tuple[Path, str], stopped: tuple[Path, str, list[int]], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(stopped[0], folder)
    (folder / "ranks.json").unlink()
    done = steps_done(folder)
    (tmp_path / "held.py").write_text(HELD_JOB)
    process = start(tmp_path, "held:until_killed", *SIZES, *CHECKED, "-o", "run", "--resume")
    wait_for(lambda: (folder / "ranks.json").is_file() and steps_done(folder) >= 12, process)
    first = json.loads((folder / "ranks.json").read_text())
    os.kill(first[1], signal.SIGKILL)
    (tmp_path / "killed").touch()
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    assert "rank 1 was killed by SIGKILL: starting again from the last checkpoint (1 of 3)" in output
    resumed, again = [int(number) for number in re.findall(r"resumed from step (\d+) ", output)]
    assert resumed == done
    assert again in (done, 10)
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


@pytest.mark.xdist_group("gloo")
def test_a_model_of_ones_own_and_resuming_with_other_ranks_and_schedule(gloo_pool: GlooPool, tmp_path: Path) -> None:
    (tmp_path / "my_module.py").write_text(JOB)
    options = ("my_module:build", "--microbatches", "2", "--validate-every", "3", "-o", "run")
    output = under_torchrun(gloo_pool, 2, tmp_path, *options, "--steps", "6")
    assert "Sequential of" in output
    assert "pipelined == unpipelined over 3 steps: largest difference 0.0" in output
    output = under_torchrun(gloo_pool, 1, tmp_path, *options, "--steps", "8", "--schedule", "gpipe", "--resume")
    assert "resumed from step 6" in output
    assert "1 stage on 1 rank (loop), 2 microbatches, schedule gpipe: given" in output
    scope: dict[str, Any] = {}
    exec(JOB, scope)
    model, data, loss_fn, optimizer, validation = scope["build"]()
    job = Job(model, batches_of(data)[0], loss_fn, optimizer, validation=validation)
    options_of_run = TrainOptions.of_file(tmp_path / "run" / "options.json")
    update = Update(options_of_run, job)
    plain = Unpipelined(update, model, range(2))
    expected = update.first_losses(plain, 8)
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0]
    folder = str(tmp_path / "run")
    compared = CliRunner().invoke(main, ["compare", "--from", folder, "--ranks", "2"])
    assert compared.exit_code == 0, compared.output
    assert re.search(r"1f1b +1 +[0-9.]+ [mµ]?s", compared.output), compared.output
    (tmp_path / "run" / "report.html").unlink()
    assert CliRunner().invoke(main, ["report", folder]).output.strip() == f"{folder}/report.html"
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.xdist_group("own")
def test_an_exception_ends_the_run_at_once_and_is_shown(tmp_path: Path) -> None:
    """It would come again: starting again is for ranks that were killed."""
    (tmp_path / "broken.py").write_text("def build():\n    raise LookupError('no such data')\n")
    output = run(tmp_path, "broken:build", "--ranks", "1", code=1)
    assert output.count("LookupError: no such data") == 1
    assert "starting again" not in output
    assert "click" not in output, "the frames above the run are of no interest"
    assert output.endswith("Error: rank 0 ended with exit code 1; its output is above.\n")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--schedule", "1f1c"], "Did you mean '1f1b'?"),
        (["--ranks", "2", "--min-ranks", "3"], "--min-ranks 3 with --ranks 2"),
        (["--stages", "3"], "expected a multiple of 2"),
        (["--size", "huge"], "no size is called 'huge'; there are: tiny, small"),
        (["--microbatches", "32"], "expected at least a row for each"),
        (["my_module"], "write module:function, for example my_module:build"),
        (["no_such_module:build"], "there is no module 'no_such_module' in"),
        (["--data", "nowhere.txt"], "does not exist"),
        (["--steps", "-1"], "--steps -1; expected a number from 0 to"),
        (["--device", "cpus"], "--device 'cpus': "),
        (["--device", "cuda:1"], "give the kind alone (cuda)"),
        (["--device", "xpu"], "2 ranks need a device each, and there are 0 here"),
        (["--backend", "carrier-pigeon"], "--backend 'carrier-pigeon' is not in this torch; it has gloo"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_started(
    arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.train.launch.launch", lambda *_, **__: pytest.fail("started"))
    done = CliRunner().invoke(main, ["train", *arguments])
    assert done.exit_code in (1, 2)
    assert expected in done.output


def test_a_program_may_call_the_command_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The ranks were called with what stood in sys.argv, whoever had called."""
    told: list[list[str]] = []
    monkeypatch.setattr("penstock.train.launch.launch", lambda _, arguments, **__: told.append(list(arguments)))
    monkeypatch.setattr(sys, "argv", ["my_program.py", "train", "--wrong"])
    main(["train", "--steps", "3", "-o", str(tmp_path)], standalone_mode=False)
    assert told == [["--steps", "3", "-o", str(tmp_path)]]


def test_what_a_build_function_may_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "returns.py").write_text("def one():\n    return 1\ndef given(options):\n    return options.seed\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("one", "given"):
        with pytest.raises(PenstockError, match=r"returned int; expected \(model, data, loss, optimizer\)"):
            make_job(TrainOptions(build=f"returns:{name}"))
    with pytest.raises(PenstockError, match="cannot be found: No module named 'nowhere'"):
        make_job(TrainOptions(build="nowhere:build"))


def test_a_resumed_run_has_the_options_that_it_had(tmp_path: Path) -> None:
    first = TrainOptions(build="a:b", schedule="zbv", microbatches=4, steps=7, output=str(tmp_path))
    (tmp_path / OPTIONS).write_text(first.dumps())
    now = TrainOptions(resume=True, output=str(tmp_path), steps=9, schedule="1f1b")
    assert now.resumed(["resume", "output", "steps"]) == replace(first, resume=True, steps=9)
    assert now.resumed(["resume", "output", "schedule"]) == replace(first, resume=True, schedule="1f1b")
    fresh = TrainOptions(output=str(tmp_path))
    assert fresh.resumed(["output"]) is fresh, "only --resume looks at what was there"


def test_a_report_of_no_run_says_what_to_give(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert done.exit_code == 1
    assert "has no report.json: give the output folder" in done.output
