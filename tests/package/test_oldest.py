"""penstock with the oldest versions that its metadata promises, which `make test` puts into .venv/oldest."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OLDEST = Path(sys.prefix) / "oldest"
EXTRAS = Path(sys.prefix) / "oldest-extras"


def pins(file: Path) -> dict[str, str]:
    """The exact versions in a file of constraints, by name."""
    lines = (line.split("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
    return dict(line.split("==") for line in lines if line)


def test_the_oldest_are_what_the_metadata_promises() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    used = {**pins(ROOT / "constraints.txt"), **pins(HERE / "oldest.txt")}
    for text in project["dependencies"]:
        wanted = Requirement(text)
        (bound,) = wanted.specifier
        assert bound.operator == ">="
        assert used[wanted.name].startswith(bound.version + "."), f"{text}: the tests have {used[wanted.name]}"


def test_the_oldest_of_the_extras_are_what_the_metadata_promises() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    used = {**pins(ROOT / "constraints.txt"), **pins(HERE / "oldest-extras.txt")}
    for text in (text for extra in ("hf", "lightning", "log", "solver") for text in extras[extra]):
        wanted = Requirement(text)
        for bound in wanted.specifier:
            assert bound.operator == ">="
            assert used[wanted.name].startswith(bound.version + "."), f"{text}: the tests have {used[wanted.name]}"


PROGRAM = """
from importlib.metadata import version
import numpy, torch, penstock
from penstock.cli.main import main

print(version("click"), numpy.__version__, version("rich"))
for command in ("compare", "plan zbv --lowered -o plan.csv", "check plan.csv", "show plan.csv", "--help"):
    main(command.split(), standalone_mode=False)

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
pipe = penstock.Pipeline(model, example=(torch.randn(4, 4),), loss_fn=torch.nn.MSELoss(), microbatches=2)
optimizer = torch.optim.AdamW(pipe.parameters())
pipe.step(torch.randn(4, 4), target=torch.randn(4, 2))
optimizer.step()
pipe.save("kept", optimizer=optimizer)
pipe.load("kept", optimizer=optimizer)
"""


@pytest.mark.skipif(
    not OLDEST.is_dir(), reason=f"{OLDEST} is not there: `make test` fills it, from tests/package/oldest.txt"
)
def test_commands_and_checkpoints_work_with_them(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(OLDEST), str(ROOT / "src")])}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    versions = [pins(HERE / "oldest.txt")[name] for name in ("click", "numpy", "rich")]
    assert done.stdout.splitlines()[0].split() == versions
    assert "makespan" in done.stdout


@pytest.mark.skipif(
    not EXTRAS.is_dir(), reason=f"{EXTRAS} is not there: `make others` fills it, from oldest-extras.txt"
)
@pytest.mark.timeout(600)
@pytest.mark.long(
    "the newest versions, in tests/train/test_events.py, tests/search/test_exact.py and tests/integrations"
)
def test_loggers_solver_and_integrations_work_with_them() -> None:
    """peft 0.17 and mlflow 3.0 were promised, and could not be imported beside what pip installs with them."""
    tests = [
        "train/test_events.py",
        "search/test_exact.py",
        "integrations/test_lightning.py",
        "integrations/test_peft.py",
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/{file}" for file in tests)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXTRAS), str(ROOT / "src")])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
