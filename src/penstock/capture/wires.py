"""What enters and leaves a stage.

stage.inputs     # (Wire("x", source=None, ...), Wire("add_3", source=0, ...))
stage.outputs    # values that later stages use, or the leaves of the model's output
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import fx
from torch.utils._sympy.printers import PythonPrinter

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
        steps = accumulate(reversed(value.shape[1:]), lambda step, size: size * step, initial=1)
        return [str(s) for s in value.stride()] == [str(s) for s in steps][::-1]
    return value.is_contiguous()


def size_of(size: int | torch.SymInt) -> Size:
    if isinstance(size, torch.SymInt):
        number = size.node.maybe_as_int()
        return str(size.node.expr) if number is None else int(number)
    return int(size)


def misfit(
    wires: Sequence[Wire],
    values: Sequence[object],
    sizes: dict[str, int],
    why_static: str = "",
    asked: Collection[tuple[str, int]] = (),
) -> str:
    """Which value does not have the sizes that were captured, or ""; `sizes` gets what each changing size is now.

    `asked`: arguments and dimensions that were to stay open. One of these that is fixed is so by the model's own code.
    """
    for wire, value in zip(wires, values, strict=True):
        if not isinstance(value, torch.Tensor):
            continue
        shape = value.shape
        if len(shape) != len(wire.shape):
            return (
                f"{wire.name} has {len(shape)} dimensions {tuple(shape)}; the model was captured with "
                f"{len(wire.shape)} ({', '.join(map(str, wire.shape))})"
            )
        for dim, (expected, now) in enumerate(zip(wire.shape, shape, strict=True)):
            if isinstance(expected, str):
                if sizes.setdefault(expected, now) != now:
                    return (
                        f"dimension {dim} of {wire.name} is {now}, and must equal another dimension of this call that is "
                        f"{sizes[expected]} (both are {expected})"
                    )
            elif expected != now:
                may_open = wire.source is None and not why_static and expected != 1 and (wire.name, dim) not in asked
                open_it = f"dynamic_shapes={{{wire.name!r}: {{{dim}: torch.export.Dim.AUTO}}}}, or with "
                return (
                    f"dimension {dim} of {wire.name} is {now}; the model was captured with {expected} there, and that "
                    f"dimension is fixed{why_static and f' ({why_static})'}. Capture with {open_it * may_open}an example "
                    "that has this size: one microbatch of the batches to come"
                )
    return ""


def where(shapes: Iterable[tuple[str, Sequence[Size]]], fixed: Fixed, verb: str) -> str:
    """The dimensions that have these sizes, as a user would say it."""
    known: dict[Size, int] = dict(fixed)
    return " and ".join(
        f"dimension {dim} of {name} {verb} {known[size]}"
        for name, shape in shapes
        for dim, size in enumerate(shape)
        if size in known
    )


def same_wires(old: Sequence[Wire], new: Sequence[Wire]) -> bool:
    """Whether two captures of a model send the same things in the same order."""
    first, second = ([(w.source, w.stages, w.dtype, len(w.shape)) for w in wires] for wires in (old, new))
    return first == second


@dataclass(frozen=True)
class Guard:
    """One condition, as Python text, and the sizes that it speaks of."""

    text: str
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        """Make a function of the text, through which torch.compile can look."""
        object.__setattr__(self, "_function", eval(f"lambda {', '.join(self.names)}: {self.text}", {"math": math}))

    def __reduce__(self) -> tuple[object, ...]:
        return Guard, (self.text, self.names)

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether it is true; a stage that does not see all of these sizes leaves it to others."""
        given = [sizes[name] for name in self.names if name in sizes]
        return len(given) < len(self.names) or bool(self._function(*given))  # type: ignore[attr-defined]


def guards_of(program: torch.export.ExportedProgram) -> tuple[Guard, ...]:
    """What torch.export noted."""
    values = (node.meta.get("val") for node in program.graph.nodes)
    shapes = (v.fake_mode.shape_env for v in values if isinstance(v, torch._subclasses.FakeTensor))
    noted = next(shapes, None)
    printer = PythonPrinter()
    found = () if noted is None else (guard.expr for guard in noted.guards)
    return tuple(Guard(printer.doprint(one), tuple(sorted(map(str, one.free_symbols)))) for one in found)


def where_shapes_differ(known: Sequence[Sequence[int | str]], here: Sequence[Sequence[int | str]]) -> list[Guard]:
    """Sizes that may change by the first trace of a model, and are fixed or tied to another by a later one."""
    pairs = {(old, new) for one, other in zip(known, here, strict=True) for old, new in zip(one, other, strict=True)}
    return [
        Guard(f"{old} == {new}", (old, new) if isinstance(new, str) else (old,))
        for old, new in sorted(pairs, key=str)
        if isinstance(old, str) and old != new
    ]
