"""The examples of the documentation run, and print what the pages show.

The blocks of a page run in order, in a folder of its own:

    ```python               runs; all blocks of a page share their names
    ```python no-run        must compile
    ```python file=demo.py  is written to that file, for a command below it
    ```console              its lines `$ penstock ...`, `$ python ...` and `$ torchrun ...` run and must succeed; a line that
                            ends in `# exits with 1` must fail so. Other commands (`$ make`, `$ ssh`) are shown only.
    ```console no-run       is shown only
    ```text                 below a python block: is what the page has printed so far, somewhere

What a page shows is compared without regard to white space; `...` stands for anything.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from penstock.schedules import registry

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
COMMAND = re.compile(r"\$ (.*?)(?:\s+# exits with (\d+))?$")
RUN = ("penstock ", "python ", "torchrun ")


@dataclass(frozen=True)
class Block:
    kind: str
    mark: str  # what stands behind the kind
    text: str
    line: int  # of the page, from 1

    @property
    def runs(self) -> bool:
        return "no-run" not in self.mark

    @property
    def file(self) -> str | None:
        named = re.search(r"file=(\S+)", self.mark)
        return named and named[1]


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(m[1], m[2].strip(), m[3], text.count("\n", 0, m.start(3)) + 1) for m in BLOCK.finditer(text)]


@pytest.fixture
def own_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page registers is gone after it."""
    for name in ("_RECIPES", "_BY_SPELLING"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))


@pytest.fixture
def module(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Where the names of a page live, in its own folder; a real module, so that its classes can be found again."""
    made = ModuleType("docs_" + request.node.callspec.id.replace("-", "_").replace(".", "_"))
    before = set(sys.modules)
    sys.modules[made.__name__] = made
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield made
    for name in set(sys.modules) - before:
        if name == made.__name__ or (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.processes
@pytest.mark.timeout(300)  # a page may start three runs, each of several processes
@pytest.mark.filterwarnings("ignore:torch.distributed.pipelining had been imported before")  # by other tests' modules
@pytest.mark.usefixtures("own_schedules")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_runs(page: Path, module: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = ""
    for block in blocks_of(page):
        match block.kind:
            case "python":
                code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
                if block.file is not None:
                    (tmp_path / block.file).write_text(block.text, encoding="utf-8")
                elif block.runs:
                    exec(code, module.__dict__)
                    printed += capsys.readouterr().out
            case "text" if block.runs:
                assert_shown(block.text.splitlines(), printed, f"{page}:{block.line}")
            case "console" if block.runs:
                for command, status, shown in commands_of(block):
                    printed = run(command, status, tmp_path, f"{page}:{block.line}")
                    assert_shown(shown, printed, f"{page}:{block.line}: {command}")


def commands_of(block: Block) -> Iterator[tuple[str, int, list[str]]]:
    """Each command to run, its exit status, and the lines that are shown below it."""
    found: list[tuple[str, int, list[str]]] = []
    for line in block.text.splitlines():
        if command := COMMAND.match(line):
            found.append((command[1], int(command[2] or 0), []))
        elif found:
            found[-1][2].append(line)
    return (entry for entry in found if entry[0].startswith(RUN))


def run(command: str, status: int, folder: Path, where: str) -> str:
    programs = str(Path(sys.executable).parent)
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([programs, os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
    }
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == status, f"{where}: {command} exits with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def assert_shown(shown: list[str], printed: str, where: str) -> None:
    """The shown lines are in what was printed; `...` stands for anything."""
    parts = "\n".join(shown).split("...")
    rest = " ".join(printed.split())
    for part in filter(None, (" ".join(part.split()) for part in parts)):
        assert part in rest, f"{where} shows\n{part}\nwhich is not in\n{rest}"
        rest = rest.split(part, 1)[1]


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in LINK.findall(BLOCK.sub("", page.read_text(encoding="utf-8"))):
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name} links to {path}, which is not there"
        if anchor and there.suffix == ".md":
            assert anchor in anchors_of(there), f"{page.name} links to {there.name}#{anchor}, which has no such heading"


def test_every_page_is_in_the_index() -> None:
    docs = ROOT / "docs"
    listed = {path for path, _ in LINK.findall((docs / "index.md").read_text(encoding="utf-8"))}
    assert {str(page.relative_to(docs)) for page in PAGES if page.is_relative_to(docs)} - {"index.md"} <= listed
