"""What hosts and tools read of a project that others join: it is there, can be read, and calls what is here."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import penstock

ROOT = Path(__file__).parents[2]


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_the_hosted_check_is_the_local_one() -> None:
    steps = [step for job in read(".github/workflows/ci.yml")["jobs"].values() for step in job["steps"]]
    assert "bash .ci/run" in [step.get("run") for step in steps]
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_what_a_workflow_makes_the_makefile_knows() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        called = set(re.findall(r"run: make (\w+)", file.read_text(encoding="utf-8")))
        assert called <= targets, file.name
    assert {"train", "test", "coverage", "docs", "dist", "soak", "others"} <= targets


def test_hooks_before_a_commit_run_the_tools_of_the_environment() -> None:
    hooks = [hook for repository in read(".pre-commit-config.yaml")["repos"] for hook in repository["hooks"]]
    entries = " ".join(hook["entry"] for hook in hooks)
    assert "ruff check" in entries
    assert "ruff format" in entries
    assert "mypy" in entries


@pytest.mark.parametrize("template", ["bug.yml", "wish.yml"])
def test_a_template_asks_something(template: str) -> None:
    form = read(f".github/ISSUE_TEMPLATE/{template}")
    assert {"name", "description", "body"} <= form.keys()
    assert any(entry["type"] == "textarea" and entry["validations"]["required"] for entry in form["body"])


def test_the_version_stands_in_one_place_and_the_changelog_has_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "penstock.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+\w*", penstock.__version__)
    released = penstock.__version__.partition("dev")[0].rstrip(".")
    assert f"## {released}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
