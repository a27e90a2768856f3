"""Programs that know nothing of penstock: under the alias they give the numbers that they give with torch's own package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gloo_pool import free_port

PROGRAMS = Path(__file__).parent / "programs"
SOURCE = Path(__file__).parents[2] / "src"
RANKS = 2
LONG = 240  # seconds for processes that import torch; a busy machine takes most of them
pytestmark = pytest.mark.timeout(2 * LONG + 20)
SAME_NUMBERS = ["tutorial_manual", "tutorial_traced", "trainer", "overlap", "subclasses", "drivers"]


def environment(**extra: str) -> dict[str, str]:
    paths = [str(SOURCE), os.environ.get("PYTHONPATH", "")]
    plain = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONWARNINGS": "ignore"}
    return {**os.environ, **plain, **extra}


def start(program: str, *arguments: str, alias: bool, port: str = "0") -> list[subprocess.Popen[str]]:
    """The program on two ranks, as a launcher starts it."""
    command = [sys.executable, *(["-m", "penstock.compat"] if alias else []), str(PROGRAMS / program), *arguments]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    sizes = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    return [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **meeting, **sizes),
        )
        for rank in range(RANKS)
    ]


def finish(ranks: list[subprocess.Popen[str]]) -> list[str]:
    try:
        texts = [rank.communicate(timeout=LONG)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * RANKS, "\n".join(texts)
    return texts


def numbers(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def close(found: Any, expected: Any, path: str = "") -> None:
    assert type(found) is type(expected), path
    if isinstance(found, dict):
        assert list(found) == list(expected), path
        for key in found:
            close(found[key], expected[key], f"{path}/{key}")
    elif isinstance(found, list):
        assert len(found) == len(expected), path
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            close(one, other, f"{path}/{place}")
    elif isinstance(found, float):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-11), path
    else:
        assert found == expected, path


@pytest.mark.processes
@pytest.mark.slow
def test_same_numbers_as_torch(tmp_path: Path) -> None:
    """One pair of processes runs all programs, with either package: importing torch is most of the time."""
    reports: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for package, alias in (("torch.distributed.pipelining", False), ("penstock.compat", True)):
        (folder := tmp_path / package).mkdir()
        with_ports = [word for program in SAME_NUMBERS for word in (program, str(free_port()))]
        finish(start("one_after_another.py", str(folder), *with_ports, alias=alias))
        reports[package] = {program: numbers(folder / program) for program in SAME_NUMBERS}
    for package, programs in reports.items():
        assert {rank["package"] for ranks in programs.values() for rank in ranks} == {package}
    expected, found = reports.values()
    close(*({p: [rank["numbers"] for rank in ranks] for p, ranks in one.items()} for one in (found, expected)))


@pytest.mark.processes
@pytest.mark.slow
def test_accelerate_runs_unchanged() -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    texts = finish(start("pippy.py", alias=True, port=str(free_port())))
    for model in ("GPT2LMHeadModel", "BertForMaskedLM", "T5ForConditionalGeneration", "LlamaForCausalLM"):
        assert f"{model} penstock.compat" in texts[-1], texts[-1]


@pytest.mark.processes
def test_torchrun(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "penstock.compat"]
    command += [str(PROGRAMS / "tutorial_manual.py"), str(tmp_path / "out")]
    done = subprocess.run([sys.executable, *command], env=environment(), capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stderr
    assert {rank["package"] for rank in numbers(tmp_path / "out")} == {"penstock.compat"}


@pytest.mark.processes
def test_processes_that_a_program_starts_have_the_alias_too() -> None:
    command = [sys.executable, "-m", "penstock.compat", str(PROGRAMS / "spawning.py")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["penstock.compat"] * 3


def test_a_module_instead_of_a_file() -> None:
    command = [sys.executable, "-m", "penstock.compat", "-m", "json.tool", "--help"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stderr
    assert "json" in done.stdout
    done = subprocess.run(command[:3], env=environment(), capture_output=True, text=True, timeout=LONG)
    assert done.returncode != 0
    assert "usage" in done.stderr


SWITCHING = """
import sys, types, warnings
import torch
import torch.distributed.pipelining as theirs
from torch.distributed.pipelining import PipelineStage as Theirs
library = sys.modules["library"] = types.ModuleType("library")
library.stage = Theirs
from penstock import compat
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    compat.install()
    compat.install()
assert len(told) == 1 and "library" in str(told[0].message), told
from torch.distributed.pipelining import PipelineStage as Ours
import torch.distributed.pipelining.schedules as schedules
import penstock
assert issubclass(Ours, penstock.PipelineStage) and torch.distributed.pipelining is compat
assert issubclass(schedules.Schedule1F1B, penstock.Schedule1F1B)
compat.uninstall()
compat.uninstall()
import torch.distributed.pipelining.schedules as schedules
from torch.distributed.pipelining import PipelineStage
assert PipelineStage is Theirs and torch.distributed.pipelining is theirs
assert schedules.__name__ == "torch.distributed.pipelining.schedules"
"""


def test_the_alias_is_put_on_and_taken_off_at_any_time() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SWITCHING], env=environment(), capture_output=True, text=True, timeout=LONG
    )
    assert done.returncode == 0, done.stderr
