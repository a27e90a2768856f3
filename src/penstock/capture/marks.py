"""Where the user wants the cuts: marks in the model's code, or modules named from outside.

    pipe_split()                                                    # a line in forward
    pipeline(model, (x,), split_spec={"layers.4": SplitPoint.BEGINNING})

Both become the same thing while the model is traced: a call of the operator ``penstock::mark``, which leaves a node in
the graph at the place where it was called and computes nothing. Named modules are watched with torch's hooks for all
modules, so that neither the user's module nor its class is touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.fx.node import has_side_effect
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import checkpoint as checkpoints

from penstock.errors import CaptureError
from penstock.misfits import takes

_library = torch.library.Library("penstock", "FRAGMENT")
_library.define("mark(str what) -> ()")


def _mark_nothing(what: str) -> None:
    del what


_library.impl("mark", _mark_nothing, "CompositeExplicitAutograd")
mark = torch.ops.penstock.mark.default
has_side_effect(mark)


class SplitPoint(Enum):
    """On which side of a module's call the cut lies.

    pipeline(model, (x,), split_spec={"layers.2": SplitPoint.BEGINNING})
    """

    BEGINNING = 1
    END = 2


class PipeSplitWrapper:
    """The holder under which existing programs know ``SplitPoint``.

    PipeSplitWrapper.SplitPoint.BEGINNING is SplitPoint.BEGINNING
    """

    SplitPoint = SplitPoint


_annotated: WeakKeyDictionary[nn.Module, frozenset[SplitPoint]] = WeakKeyDictionary()


def pipe_split() -> None:
    """Begin a new stage here. Outside of a capture this does nothing.

    def forward(self, x):
        x = self.encoder(x)
        pipe_split()
        return self.decoder(x)
    """
    if torch.compiler.is_exporting():
        mark("pipe_split()")


@takes(CaptureError)
def annotate_split_points(module: nn.Module, spec: Mapping[str, SplitPoint]) -> None:
    """Remember cuts for a later ``pipeline(module, ...)``. The module itself stays as it is.

    annotate_split_points(model, {"layers.4": SplitPoint.BEGINNING})
    """
    for name, point in spec.items():
        target = submodule(module, name)
        _annotated[target] = _annotated.get(target, frozenset()) | {point}


def remembered(module: nn.Module) -> dict[str, frozenset[SplitPoint]]:
    """The cuts remembered for the submodules of `module`, by name."""
    found = {}
    for name, child in module.named_modules():
        points = _annotated.get(child)
        if points:
            found[name] = points
    return found


def submodule(module: nn.Module, name: str) -> nn.Module:
    """The submodule called `name`, or an error that names what is near."""
    try:
        return module.get_submodule(name)
    except AttributeError:
        known = [n for n, _ in module.named_modules() if n]
        head = name.rsplit(".", 1)[0]
        near = [n for n in known if n.startswith(head)] or known
        raise CaptureError(
            f"{type(module).__name__} has no submodule {name!r}; its submodules are called like "
            f"{', '.join(repr(n) for n in near[:6])}{' ...' if len(near) > 6 else ''}"
        ) from None


CHECKPOINT_BEGIN = "checkpoint begins"
CHECKPOINT_END = "checkpoint ends"


@contextmanager
def watching_checkpoints() -> Iterator[None]:
    """While open, ``torch.utils.checkpoint`` leaves marks around the function that it is given.

    Export runs straight through a checkpoint and forgets it; the marks let the stages have it again.
    """
    original = checkpoints._checkpoint_without_reentrant_generator

    def marked(*args: object, **kwargs: object) -> Iterator[None]:
        del args, kwargs
        mark(CHECKPOINT_BEGIN)
        yield
        mark(CHECKPOINT_END)

    checkpoints._checkpoint_without_reentrant_generator = marked
    try:
        yield
    finally:
        checkpoints._checkpoint_without_reentrant_generator = original


@contextmanager
def watching(module: nn.Module, points: Mapping[str, frozenset[SplitPoint]]) -> Iterator[set[str]]:
    """While open, every call of a named submodule leaves its marks. Yields the names that were called so far."""
    names = {id(submodule(module, name)): name for name in points}
    called: set[str] = set()

    def before(child: nn.Module, args: object) -> None:
        del args
        name = names.get(id(child))
        if name is not None:
            called.add(name)
            if SplitPoint.BEGINNING in points[name]:
                mark(f"the beginning of {name}")

    def after(child: nn.Module, args: object, output: object) -> None:
        del args, output
        name = names.get(id(child))
        if name is not None and SplitPoint.END in points[name]:
            mark(f"the end of {name}")

    handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after)] if names else []
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()
