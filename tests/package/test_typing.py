"""The names of `penstock` as editors and type checkers see them, and as Python finds them."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import penstock
from penstock.front.option_types import PipelineOptions
from penstock.front.pipeline_options import GROUPS

ROOT = Path(__file__).resolve().parents[2]
PYRIGHT = Path(sys.prefix) / "pyright" / "node_modules" / ".bin" / "pyright"


def declared() -> dict[str, str]:
    """Names that the branch for type checkers of penstock/__init__.py imports, with their modules."""
    tree = ast.parse(Path(penstock.__file__).read_text())
    branch = next(node for node in tree.body if isinstance(node, ast.If))
    return {alias.name: node.module for node in branch.body if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_type_checkers_see_the_names_that_there_are() -> None:
    packages = {name for name, module in declared().items() if module == "penstock"}
    assert {name: module for name, module in declared().items() if name not in packages} == penstock._HOME
    assert packages == set(penstock._PACKAGES)


def test_every_public_name_resolves() -> None:
    for name in [*penstock.__all__, *penstock._PACKAGES]:
        assert getattr(penstock, name) is not None
        assert name in dir(penstock)


def test_at_most_sixty_names() -> None:
    assert len(penstock.__all__) <= 60


def test_moved_names_warn_and_work() -> None:
    for name, home in penstock._MOVED.items():
        with pytest.warns(DeprecationWarning, match=f"use {home}.{name} instead of penstock.{name}"):
            assert getattr(penstock, name).__name__ == name


def test_every_option_has_a_type_and_a_description() -> None:
    """Editors complete the keywords of Pipeline from PipelineOptions; the dataclasses have the defaults."""
    assert set(PipelineOptions.__annotations__) == {field.name for group in GROUPS for field in fields(group)}
    (cls,) = ast.parse(inspect.getsource(PipelineOptions)).body
    assert isinstance(cls, ast.ClassDef)
    for option, text in zip(cls.body[1::2], cls.body[2::2], strict=True):
        assert isinstance(option, ast.AnnAssign)
        assert isinstance(text, ast.Expr), f"{ast.unparse(option)} has no description"


@pytest.mark.skipif(not PYRIGHT.exists(), reason="pyright is not installed: `make pyright`, which needs npm")
def test_pyright_accepts_uses_and_rejects_misuses() -> None:
    """mypy checks the same two programs in `make lint`."""
    done = subprocess.run(
        [PYRIGHT, "--pythonpath", sys.executable], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout
    assert "0 errors" in done.stdout
