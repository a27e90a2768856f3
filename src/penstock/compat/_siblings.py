"""Torch's names: where programs find them, and whether they have put something of their own in the place of a method.

A program takes a name from a module because torch's own has it there, though it is at home somewhere else.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from penstock.errors import UnknownNameError

TORCHS = "torch.distributed.pipelining"
_INSTEAD = {
    "_backward": "penstock walks graphs in its own way, see stage_backward_input",
    "_schedule_visualizer": "penstock draws in its own way, see penstock.show",
}
_CAPTURES = "penstock captures models in its own way, see penstock.pipeline"


def found_in(module: str, *rooms: str) -> Callable[[str], Any]:
    """A `__getattr__` for a module: what it does not have itself is in one of these files of the package, there perhaps
    without the underscore, or where the module of that name in torch imports it from. What else is made there is inside
    torch's functions, and of no use without them: it can be imported, and says so when it is used.

    >>> from penstock.compat.stage import flatten_args, nn
    >>> flatten_args.__module__, nn.__name__
    ('penstock.compat._utils', 'torch.nn')
    """
    short = module.rpartition(".")[2]

    def find(name: str) -> Any:
        if name == "logger":
            return importlib.import_module("logging").getLogger(module)
        for room in () if name.startswith("__") else rooms:
            inside = vars(importlib.import_module(room, "penstock.compat"))
            for known in (name, name.removeprefix("_")):
                if known in inside:
                    return inside[known]
        source, imports = ("", {}) if name.startswith("__") else _torchs(short)
        if name in imports:
            return pkgutil.resolve_name(imports[name])
        if re.search(rf"^(?:def |class )?{name}\b", source, re.MULTILINE):
            return _refusal(f"{module}.{name} is inside torch's own functions; {_INSTEAD.get(short, _CAPTURES)}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find


@cache
def _torchs(short: str) -> tuple[str, dict[str, str]]:
    """A module of torch's: its text, and where it imports each name from, as `pkgutil.resolve_name` takes it."""
    file = Path(torch.__file__).parent / "distributed" / "pipelining" / f"{short}.py"
    source = file.read_text(encoding="utf-8")
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update({alias.asname or alias.name: alias.name for alias in node.names})
        elif isinstance(node, ast.ImportFrom):
            home = f"{TORCHS}.{node.module}" if node.level else str(node.module)
            home = home.replace(TORCHS, "penstock.compat")
            found.update({alias.asname or alias.name: f"{home}:{alias.name}" for alias in node.names})
    return source, found


def _refusal(text: str) -> Callable[..., Any]:
    def refuse(*_: object, **__: object) -> Any:
        raise UnknownNameError(text)

    return refuse


def renamed(name: str) -> object:
    """An attribute of penstock's under torch's name; a program may set it."""
    return property(lambda self: getattr(self, name), lambda self, value: setattr(self, name, value))


def is_overridden(thing: object, *names: str) -> bool:
    """Whether a program has put something of its own in the place of a method: in a subclass, on the object itself, or on one
    of the classes here. Where a function was written tells, which decorators that copy its name and module do not change.
    """
    homes = [getattr(getattr(type(thing), name), "__globals__", {}).get("__name__", "") for name in names]
    return not all(home.startswith("penstock.compat.") for home in homes) or not vars(thing).keys().isdisjoint(names)
