"""Conditions on sizes under which a trace of the model is right.

    Guard("s28 > 3", frozenset({"s28"})).holds({"s28": 2})      # False: with two rows the model does something else

A branch on a size (``if x.shape[0] > 3``) is taken once, while the model is traced; torch.export notes what it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils._sympy.printers import PythonPrinter


@dataclass(frozen=True)
class Guard:
    """One condition, as Python text, and the sizes that it speaks of."""

    text: str
    names: frozenset[str]

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether it is true; a stage that does not see all of these sizes leaves it to others."""
        return not self.names <= sizes.keys() or bool(eval(self.text, {"math": math}, dict(sizes)))


def guards_of(program: torch.export.ExportedProgram) -> tuple[Guard, ...]:
    """What torch.export noted."""
    values = (node.meta.get("val") for node in program.graph.nodes)
    modes = (value.fake_mode for value in values if isinstance(value, torch._subclasses.FakeTensor))
    mode = next(modes, None)
    if mode is None or mode.shape_env is None:
        return ()
    printer = PythonPrinter()
    return tuple(
        Guard(printer.doprint(guard.expr), frozenset(map(str, guard.expr.free_symbols)))
        for guard in mode.shape_env.guards
    )


def where_shapes_differ(known: Sequence[Sequence[int | str]], here: Sequence[Sequence[int | str]]) -> list[Guard]:
    """Sizes that may change by the first trace of a model, and are fixed or tied to another by a later one."""
    pairs = {(old, new) for one, other in zip(known, here, strict=True) for old, new in zip(one, other, strict=True)}
    return [
        Guard(f"{old} == {new}", frozenset({old, new} if isinstance(new, str) else {old}))
        for old, new in sorted(pairs, key=str)
        if isinstance(old, str) and old != new
    ]
