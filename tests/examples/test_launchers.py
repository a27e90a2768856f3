"""What of examples/launch can be run on one machine: torchrun, and the environment that srun gives."""

from __future__ import annotations

import ast
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import penstock

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "examples" / "launch"
SIZES = ("--size", "tiny", "--batch", "8", "--microbatches", "4", "--no-measure", "--schedule", "1f1b", "--sample", "0")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(300), pytest.mark.xdist_group("own")]


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TORCHELASTIC")) and k != "RANK"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**kept, "PYTHONPATH": str(ROOT / "src"), "PATH": path, "OMP_NUM_THREADS": "1", **more}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_torchrun(tmp_path: Path) -> None:
    given = environment(OUTPUT=str(tmp_path / "run"), PORT=str(free_port()))
    command = ["sh", str(LAUNCH / "torchrun.sh"), *SIZES, "--steps", "3", "--check-steps", "0"]
    done = subprocess.run(command, env=given, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert penstock.load(tmp_path / "run" / "checkpoint").extra["step"] == 3


def tasks(folder: Path, port: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """Two tasks, as srun would start them."""
    started = []
    for number in ("0", "1"):
        slurm = {"SLURM_PROCID": number, "SLURM_LOCALID": number, "SLURM_NTASKS": "2", "SLURM_JOB_ID": "12"}
        slurm |= {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": str(port)}
        command = [sys.executable, "-m", "penstock", "train", "--resume", "-o", str(folder / "run"), *arguments]
        started.append(
            subprocess.Popen(
                command,
                env=environment(**slurm),
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return started


def test_a_job_of_slurm_stops_with_a_checkpoint_and_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "run" / "log.jsonl"
    running = tasks(tmp_path, free_port(), *SIZES, "--steps", "100000", "--check-steps", "0")
    end = time.monotonic() + 200
    try:
        while not log.is_file() or len(log.read_text().splitlines()) < 2:
            assert all(task.poll() is None for task in running), [task.communicate()[0] for task in running]
            assert time.monotonic() < end
            time.sleep(0.05)
        for task in running:
            task.send_signal(signal.SIGTERM)
        said = [task.communicate(timeout=100)[0] for task in running]
    finally:
        for task in running:
            task.kill()
    assert [task.returncode for task in running] == [143, 143], said  # what slurm.sh queues the job again for
    step = penstock.load(tmp_path / "run" / "checkpoint").extra["step"]
    again = tasks(tmp_path, free_port(), "--steps", str(step + 2))
    said = [task.communicate(timeout=100)[0] for task in again]
    assert [task.returncode for task in again] == [0, 0], said
    assert f"resumed from step {step}" in said[0]
    assert penstock.load(tmp_path / "run" / "checkpoint").extra["step"] == step + 2


def test_the_files_that_need_a_cluster_can_be_read() -> None:
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    given = {one["name"] for one in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert given == {"NODES", "RANKS", "HOST", "OUTPUT"}
    assert all(f"${{{name}:-" in (LAUNCH / "torchrun.sh").read_text() for name in given)
    ast.parse((LAUNCH / "ray_job.py").read_text())
    script = (LAUNCH / "slurm.sh").read_text()
    from penstock.train.slurm import STOPPED

    assert f'-eq {STOPPED} ] && scontrol requeue "$SLURM_JOB_ID"' in script
