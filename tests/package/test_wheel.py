"""The package as a user gets it: built from a clean copy, installed where nothing else is, and used there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from penstock import __version__
from tests.docs.test_examples import blocks_of

ROOT = Path(__file__).parents[2]
MADE = (".git", ".venv", "build", "dist", "runs", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")
NEEDED = {"torch", "numpy", "click", "rich"}

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("package"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a wheel and a source distribution, which `make dist` would fill."""
    copy = tmp_path_factory.mktemp("clean") / "penstock"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*MADE))
    run([sys.executable, "-m", "build", "--no-isolation"], folder=copy)
    return copy / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def description(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as opened:
        name = next(name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(opened.read(name).decode())


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(wheel, tmp_path_factory.mktemp("empty"))


def environment(wheel: Path, place: Path, extra: str = "") -> Path:
    """An interpreter that finds the wheel and what it asks for, with an extra or without, and nothing else."""
    run([sys.executable, "-m", "venv", "--without-pip", str(place)], folder=place)
    python = place / "bin" / "python"
    installed = next(place.glob("lib/python*/site-packages"))
    for distribution in needed_by(wheel, extra):
        lend(distribution, installed)
    run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)],
        folder=place,
    )
    return python


def needed_by(wheel: Path, extra: str) -> Iterator[metadata.Distribution]:
    """What pip would install beside the wheel, as this environment has it."""
    with zipfile.ZipFile(wheel) as opened:
        text = next(opened.read(name).decode() for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
    wanted = [(line, {"", extra}) for line in Parser().parsestr(text).get_all("Requires-Dist", [])]
    seen: set[tuple[str, frozenset[str]]] = set()
    while wanted:
        line, extras = wanted.pop()
        requirement = Requirement(line)
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        once = name, frozenset(requirement.extras)
        if once in seen or not any(
            requirement.marker is None or requirement.marker.evaluate({"extra": e}) for e in extras
        ):
            continue
        seen.add(once)
        found = metadata.distribution(name)
        wanted += [(line, {"", *requirement.extras}) for line in found.requires or []]
        yield found


def lend(distribution: metadata.Distribution, installed: Path) -> None:
    """Link the files of a distribution into another environment: the same as installing it, without the time."""
    for top in {file.parts[0] for file in distribution.files or () if not file.parts[0].startswith("..")}:
        there = Path(str(distribution.locate_file(top)))
        if there.exists() and not (installed / top).exists():
            (installed / top).symlink_to(there)


def run(command: list[str], *, folder: Path, timeout: float = 250) -> str:
    """Run it without this environment's paths; what it printed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST", "COV"))}
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_a_plain_install_pulls_four_packages(description: Message) -> None:
    wanted = [Requirement(line) for line in description.get_all("Requires-Dist", [])]
    assert {entry.name for entry in wanted if entry.marker is None} == NEEDED
    assert {"hf", "lightning", "log", "solver", "docs"} <= set(description.get_all("Provides-Extra", []))
    assert description["Version"] == __version__


def test_the_wheel_holds_the_library_and_its_pages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    kinds = {".py", ".typed", ".css", ".js", ".mjs", ".html", ".txt"}
    expected = {
        str(path.relative_to(source))
        for path in source.rglob("*")
        if path.suffix in kinds and not any(part.endswith(".egg-info") for part in path.parts)
    }
    assert names == expected | {"penstock/py.typed"}


def test_the_source_distribution_can_be_tested(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as opened:
        names = {name.split("/", 1)[1] for name in opened.getnames() if "/" in name}
    assert {"Makefile", "constraints.txt", "LICENSE", "tests/conftest.py", "docs/index.md", ".ci/run"} <= names
    assert {".github/workflows/ci.yml", ".pre-commit-config.yaml", "docs/site/hooks.py"} <= names, "which tests read"


def test_the_empty_environment_is_empty(python: Path, tmp_path: Path) -> None:
    code = "import importlib.util as u; print([n for n in ('transformers', 'pytest', 'tensorboard') if u.find_spec(n)])"
    assert run([str(python), "-c", code], folder=tmp_path).strip() == "[]"
    where = run([str(python), "-c", "import penstock; print(penstock.__file__)"], folder=tmp_path)
    assert str(python.parents[1]) in where


def test_the_command_works_in_it(python: Path, tmp_path: Path) -> None:
    assert run([str(python.parent / "penstock"), "--version"], folder=tmp_path).strip().endswith(__version__)
    run([str(python), "-m", "penstock", "plan", "zbv", "--html", "plan.html"], folder=tmp_path)
    assert "<canvas" in (tmp_path / "plan.html").read_text(encoding="utf-8")


@pytest.mark.processes
def test_the_quick_start_runs_in_it(python: Path, tmp_path: Path) -> None:
    for block in blocks_of(ROOT / "docs" / "start" / "get-started.md"):
        if block.file is not None:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    torchrun = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert "step 29: loss 2.9" in run([*torchrun, "train.py"], folder=tmp_path)


EXTRAS = {
    "hf": "import peft, safetensors\nfrom penstock.integrations.transformers import PipelineTrainer as found",
    "lightning": "from penstock.integrations.lightning import PipelineStrategy as found",
    "log": """
import wandb, mlflow.store.tracking.sqlalchemy_store  # what keeps mlflow's runs in a file
from pathlib import Path
from penstock.train.loggers import LOGGERS, check_logger, open_logger
for name in LOGGERS:
    check_logger(name)
found = open_logger("tensorboard", Path("run"))
found.close()
""",
    "solver": """
from penstock.cli.main import main
found = main("search -p 2 -m 2 --tries 1 --exact 1".split(), standalone_mode=False) or "searched"
""",
}


WEEKLY = pytest.mark.long(
    "the other extras, tests/integrations and tests/train/test_events.py with all of them; these import for six seconds each"
)


@pytest.mark.parametrize(
    "extra", [pytest.param(extra, marks=WEEKLY if extra in ("hf", "lightning", "log") else ()) for extra in EXTRAS]
)
def test_an_extra_brings_all_that_it_is_for(wheel: Path, tmp_path: Path, extra: str) -> None:
    """Each in an environment of its own: nothing that another extra brings is there by chance."""
    place = tmp_path / "environment"
    place.mkdir()
    python = environment(wheel, place, extra)
    run([str(python), "-W", "ignore", "-c", f"{EXTRAS[extra]}\nassert found"], folder=tmp_path)
