"""The files of examples/launch, as far as one machine can run them: a cluster's own commands are stood in for, penstock never."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

import penstock
from penstock.cli.main import main
from tests.examples.beside import installed_beside
from tests.gloo_pool import free_port

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "examples" / "launch"
SIZES = ("--size", "tiny", "--batch", "8", "--microbatches", "4", "--no-measure", "--schedule", "1f1b", "--sample", "0")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(300), pytest.mark.xdist_group("own")]


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TORCHELASTIC")) and k != "RANK"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**kept, "PYTHONPATH": str(ROOT / "src"), "PATH": path, "OMP_NUM_THREADS": "1", **more}


def pods() -> tuple[dict[str, str], list[str], dict[str, Any]]:
    """What the container is given, what it runs, and the job."""
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    container = job["spec"]["template"]["spec"]["containers"][0]
    return {one["name"]: one["value"] for one in container["env"]}, container["command"], job


@pytest.mark.long("test_the_pods_of_kubernetes_run_a_line_that_torchrun_and_penstock_take")
def test_two_pods_of_kubernetes_train_together(tmp_path: Path) -> None:
    """The container's own command, torchrun.sh, twice: as two hosts that find one another at HOST and PORT, one rank on each."""
    given, command, _ = pods()
    given |= {"HOST": "localhost", "PORT": str(free_port()), "RANKS": "1", "OUTPUT": str(tmp_path / "run")}
    command = [*command[:-1], str(LAUNCH / command[-1]), *SIZES, "--steps", "3", "--check-steps", "0"]
    logs = [tmp_path / f"pod-{number}.txt" for number in range(int(given["NODES"]))]
    started = []
    for log in logs:
        with log.open("w") as stream:
            started.append(
                subprocess.Popen(command, env=environment(**given), cwd=tmp_path, stdout=stream, stderr=stream)
            )
    try:
        codes = [pod.wait(200) for pod in started]
    finally:
        for pod in started:
            pod.kill()
    assert codes == [0, 0], "\n".join(log.read_text() for log in logs)
    assert penstock.load(tmp_path / "run" / "checkpoint").extra["step"] == 3


SRUN = """#!/bin/sh
for number in 0 1; do
  SLURM_PROCID=$number SLURM_LOCALID=$number SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=localhost \\
    "$@" >"task-$number.txt" 2>&1 &
  tasks="$tasks $!"
done
echo "$tasks" >tasks
code=0
for task in $tasks; do wait "$task" || code=$?; done
exit "$code"
"""


def stand_in(folder: Path, name: str, script: str) -> None:
    """A command of a cluster that this machine does not have."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / name).write_text(script)
    (folder / "bin" / name).chmod(0o755)


def slurm_job(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """What sbatch would start: slurm.sh, with an srun of two tasks."""
    given = environment(SLURM_JOB_ID="12", MASTER_PORT=str(free_port()), OUTPUT=str(folder / "run"))
    given["PATH"] = f"{folder / 'bin'}{os.pathsep}{given['PATH']}"
    return subprocess.Popen(["sh", str(LAUNCH / "slurm.sh"), *arguments], env=given, cwd=folder)


def test_a_job_of_slurm_stops_with_a_checkpoint_is_queued_again_and_goes_on(tmp_path: Path) -> None:
    stand_in(tmp_path, "srun", SRUN)
    stand_in(tmp_path, "scontrol", '#!/bin/sh\necho "$@" >>queued\n')
    log, queued = tmp_path / "run" / "log.jsonl", tmp_path / "queued"
    job = slurm_job(tmp_path, *SIZES, "--steps", "100000", "--check-steps", "0")
    tasks: list[int] = []
    end = time.monotonic() + 200
    try:
        while not log.is_file() or len(log.read_text().splitlines()) < 2:
            assert job.poll() is None, said(tmp_path)
            assert time.monotonic() < end
            time.sleep(0.05)
        tasks = [int(task) for task in (tmp_path / "tasks").read_text().split()]
        for task in tasks:
            os.kill(task, signal.SIGTERM)  # slurmd signals the tasks, not the script
        assert job.wait(100) == 143, said(tmp_path)
    finally:
        if job.poll() is None:
            for task in tasks:
                os.kill(task, signal.SIGKILL)
            job.kill()
    assert queued.read_text() == "requeue 12\n"
    step = penstock.load(tmp_path / "run" / "checkpoint").extra["step"]
    assert slurm_job(tmp_path, "--steps", str(step + 2)).wait(100) == 0, said(tmp_path)
    assert f"resumed from step {step}" in said(tmp_path)
    assert penstock.load(tmp_path / "run" / "checkpoint").extra["step"] == step + 2
    assert queued.read_text() == "requeue 12\n"  # a job that is done is not


def said(folder: Path) -> str:
    return "\n".join(file.read_text() for file in sorted(folder.glob("task-*.txt")))


def test_the_pods_of_kubernetes_run_a_line_that_torchrun_and_penstock_take(tmp_path: Path) -> None:
    """The container's own command and environment, with a torchrun that only says what it was asked for."""
    given, command, job = pods()
    stand_in(tmp_path, "torchrun", '#!/bin/sh\nprintf "%s\\n" "$@"\n')
    given = environment(**given)
    given["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{given['PATH']}"
    done = subprocess.run(command, env=given, cwd=LAUNCH, capture_output=True, text=True, timeout=60)
    spec = job["spec"]["template"]["spec"]
    asked = get_args_parser().parse_args(done.stdout.splitlines())
    assert (asked.nnodes, asked.nproc_per_node) == (str(job["spec"]["completions"]), "4")
    assert asked.rdzv_endpoint == f"{job['metadata']['name']}-0.{spec['subdomain']}:29500"
    assert (asked.module, asked.training_script) == (True, "penstock")
    with main.make_context("penstock", asked.training_script_args) as context:
        name, taker, rest = main.resolve_command(context, ["train", *asked.training_script_args[1:]])
        assert taker is not None
        options = taker.make_context(name, rest, parent=context).params
    mounted = spec["containers"][0]["volumeMounts"][0]["mountPath"]
    assert options["resume"]
    assert options["output"].startswith(mounted)


@pytest.mark.long("nothing: Ray takes 500 MB and the better part of a minute; `make test ARGS=--long` installs it")
def test_ray(tmp_path: Path) -> None:
    others = installed_beside("ray")
    given = environment(
        OUTPUT=str(tmp_path / "run"), STEPS="4", WORKERS="2", HOME=str(tmp_path), RAY_USAGE_STATS_ENABLED="0"
    )
    given["PYTHONPATH"] = os.pathsep.join([given["PYTHONPATH"], others])
    command = [sys.executable, str(LAUNCH / "ray_job.py")]
    done = subprocess.run(command, env=given, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert penstock.load(tmp_path / "run").extra["step"] == 4
