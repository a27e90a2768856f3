"""Every public name has a docstring, and in it an example: a doctest, lines of code, or a call in the text."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import penstock

INSIDE = {
    "__main__",
    "checks",
    "cli",
    "compat",
    "dtypes",
    "nest",
}  # a command, torch's own names, and what packages share


def public_names() -> Iterator[tuple[str, Any]]:
    """What `penstock` and its packages export and make themselves, once each."""
    seen = set()
    packages = [found.name for found in pkgutil.iter_modules(penstock.__path__) if found.name not in INSIDE]
    packages += ["integrations.transformers", "integrations.lightning"]
    for package in ("penstock", *(f"penstock.{name}" for name in packages)):
        module = importlib.import_module(package)
        for name in getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]:
            value = getattr(module, name)
            made_here = str(getattr(value, "__module__", "")).startswith("penstock")
            if made_here and (inspect.isclass(value) or inspect.isroutine(value)) and id(value) not in seen:
                seen.add(id(value))
                yield f"{package}.{name}", value


def has_example(text: str) -> bool:
    """
    >>> has_example("Does it well."), has_example("As in `f(x)`."), has_example("So:\\n\\nf(x)  # done")
    (False, True, True)
    """
    if ">>> " in text or re.search(r"`[^`\n]*\w\([^`]*`", text):
        return True
    return any(is_code(paragraph) for paragraph in inspect.cleandoc(text).split("\n\n")[1:])


def is_code(paragraph: str) -> bool:
    try:
        parsed = ast.parse(textwrap.dedent(paragraph))
    except SyntaxError:
        return False
    return any(isinstance(node, ast.Call | ast.Attribute | ast.Subscript | ast.ClassDef) for node in ast.walk(parsed))


def test_every_public_name_has_a_docstring_with_an_example() -> None:
    names = list(public_names())
    assert len(names) > 150
    missing = [name for name, value in names if not has_example(value.__doc__ or "")]
    assert missing == []
