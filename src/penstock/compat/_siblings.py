"""Names of one module that programs take from another, because torch's own imports them there."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def found_in(module: str, *siblings: str) -> Callable[[str], Any]:
    """A `__getattr__` for a module: what it does not have itself stands in one of its siblings.

    >>> from penstock.compat.stage import flatten_args
    >>> flatten_args.__module__
    'penstock.compat._utils'
    """

    def find(name: str) -> Any:
        for sibling in siblings if not name.startswith("__") else ():
            names = vars(importlib.import_module(f"penstock.compat.{sibling}"))
            if name in names:
                return names[name]
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find
