"""What enters and leaves a stage.

stage.inputs     # (Wire("x", source=None, ...), Wire("add_3", source=0, ...))
stage.outputs    # values that later stages use, or the leaves of the model's output
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils._sympy.printers import PythonPrinter

from penstock.errors import ShapeError

Size = int | str  # a fixed size, or the name of a size that may change from call to call
# Changing sizes for which the model is traced on its own: 1, or what a branch asks for.
Fixed = frozenset[tuple[str, int]]
Key = tuple[bool | None, Fixed]  # which graph of a stage: for this mode (None: mixed, as captured) and these sizes


@dataclass(frozen=True)
class Wire:
    """One value on its way: made by one stage (or given as an argument), used by later ones.

    [wire.name for wire in pipe.get_stage_module(1).inputs]
    """

    name: str  # unique in the model; for an argument, as a user would write it
    source: int | None  # the stage that makes it; None for an argument of the model
    stages: tuple[int, ...]  # the stages that use it, in order
    kind: str  # "tensor" or "number"
    shape: tuple[Size, ...]
    dtype: torch.dtype | None  # None for numbers
    contiguous: bool = True  # as the producer makes it

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape)) if self.kind == "tensor" else "number"
        made = "argument" if self.source is None else f"stage {self.source}"
        return f"{self.name} ({size}, from {made})"


def wire_of(node: fx.Node, name: str, *, source: int | None, stages: Sequence[int]) -> Wire:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return Wire(name, source, tuple(stages), "number", (), None)
    shape = tuple(size_of(s) for s in value.shape)
    return Wire(name, source, tuple(stages), "tensor", shape, value.dtype, _is_contiguous(value))


def _is_contiguous(value: torch.Tensor) -> bool:
    if any(isinstance(s, torch.SymInt) for s in value.shape):
        expected: list[object] = []
        step: Any = 1
        for size in reversed(value.shape):
            expected.append(str(step))
            step = size * step
        return [str(s) for s in value.stride()] == expected[::-1]
    return value.is_contiguous()


def size_of(size: int | torch.SymInt) -> Size:
    if isinstance(size, torch.SymInt):
        number = size.node.maybe_as_int()
        return str(size.node.expr) if number is None else int(number)
    return int(size)


def check_sizes(wires: Sequence[Wire], values: Sequence[object], *, why_static: str, symbols: dict[str, int]) -> None:
    """Refuse values whose sizes are not what was captured; collects what each changing size is now."""
    for wire, value in zip(wires, values, strict=True):
        if wire.kind != "tensor" or not isinstance(value, torch.Tensor):
            continue
        shape = value.shape
        if len(shape) != len(wire.shape):
            raise ShapeError(
                f"{wire.name} has {len(shape)} dimensions {tuple(shape)}; the model was captured with "
                f"{len(wire.shape)} ({', '.join(map(str, wire.shape))})"
            )
        for dim, (expected, now) in enumerate(zip(wire.shape, shape, strict=True)):
            if isinstance(expected, int):
                if expected != now:
                    raise ShapeError(_fixed(wire, dim, expected, now, why_static))
            elif symbols.setdefault(expected, now) != now:
                raise ShapeError(
                    f"dimension {dim} of {wire.name} is {now}, and must equal another dimension of this call that is "
                    f"{symbols[expected]} (both are {expected})"
                )


def _fixed(wire: Wire, dim: int, expected: int, now: int, why_static: str) -> str:
    reason = f" ({why_static})" if why_static else ""
    return (
        f"dimension {dim} of {wire.name} is {now}; the model was captured with {expected} there, and that dimension is "
        f"fixed{reason}. Capture with dynamic_shapes={{{wire.name!r}: {{{dim}: torch.export.Dim.AUTO}}}}, or with "
        "this size"
    )


def where(wires: Sequence[Wire], fixed: Fixed) -> str:
    """The dimensions that have these sizes."""
    known = dict(fixed)
    return " and ".join(
        f"dimension {dim} of {wire.name} is {known[str(size)]}"
        for wire in wires
        for dim, size in enumerate(wire.shape)
        if size in known
    )


def same_wires(old: Sequence[Wire], new: Sequence[Wire]) -> bool:
    """Whether two captures of a model send the same things in the same order."""
    plain = [replace(w, name="", shape=(), contiguous=True) for w in old]
    return plain == [replace(w, name="", shape=(), contiguous=True) for w in new] and [len(w.shape) for w in old] == [
        len(w.shape) for w in new
    ]


@dataclass(frozen=True)
class Guard:
    """One condition, as Python text, and the sizes that it speaks of."""

    text: str
    names: frozenset[str]

    def __post_init__(self) -> None:
        """Make a function of the text, through which torch.compile can look."""
        order = sorted(self.names)
        object.__setattr__(self, "_order", order)
        object.__setattr__(self, "_function", eval(f"lambda {', '.join(order)}: {self.text}", {"math": math}))

    def __reduce__(self) -> tuple[object, ...]:
        return Guard, (self.text, self.names)

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether it is true; a stage that does not see all of these sizes leaves it to others."""
        order: list[str] = self._order  # type: ignore[attr-defined]
        given = [sizes[name] for name in order if name in sizes]
        return len(given) < len(order) or bool(self._function(*given))  # type: ignore[attr-defined]


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


def sizes_fit(
    wires: Sequence[Wire], values: Sequence[object], partners: Collection[str], guards: Sequence[Guard]
) -> bool:
    """Whether values are as captured: no size that changes is 1, and no guard is broken.

    torch.compile can look through it, and then guards what it asks. `partners` names the sizes that change.
    """
    sizes: dict[str, int] = {}
    for wire, value in zip(wires, values, strict=True):
        if wire.kind != "tensor" or not isinstance(value, torch.Tensor):
            continue
        if value.dim() != len(wire.shape):
            return False
        for expected, now in zip(wire.shape, value.shape, strict=True):
            if isinstance(expected, str):
                if sizes.setdefault(expected, now) != now or (now == 1 and expected in partners):
                    return False
            elif expected != now:
                return False
    return all(guard.holds(sizes) for guard in guards)


def where_shapes_differ(known: Sequence[Sequence[int | str]], here: Sequence[Sequence[int | str]]) -> list[Guard]:
    """Sizes that may change by the first trace of a model, and are fixed or tied to another by a later one."""
    pairs = {(old, new) for one, other in zip(known, here, strict=True) for old, new in zip(one, other, strict=True)}
    return [
        Guard(f"{old} == {new}", frozenset({old, new} if isinstance(new, str) else {old}))
        for old, new in sorted(pairs, key=str)
        if isinstance(old, str) and old != new
    ]
