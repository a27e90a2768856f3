"""A stage run without data, to learn what it gives and with what its compiled parts are called; and their compilation.

    rehearsal = rehearse(module, parts, (x,), {})
    rehearsal.output                    # fake tensors: shapes, types and nothing else
    compile_calls(rehearsal.calls)      # each part is compiled for what it would be called with; its graphs are not run

Forward hooks are left out of it. Gradients, buffers, random numbers and plain attributes of modules (a counter) are as they were
afterwards; the Python code of `forward` runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from penstock.nest import Value, map_tensors
from penstock.stage.compiled import CompiledAhead, only_compiling
from penstock.stage.forward import remember
from penstock.stage.twins import CompiledPart, CompiledParts


class CannotRehearse(Exception):
    """A stage needs data to run."""


@dataclass
class PartCall:
    """A call of a compiled part, with fake tensors."""

    part: CompiledPart
    args: tuple[Value, ...]
    kwargs: dict[str, Value]
    stage: int = 0  # of which it is a part


@dataclass
class Rehearsal:
    """What a run without data showed."""

    output: Value = None
    calls: list[PartCall] = field(default_factory=list)


def rehearse(
    module: nn.Module, parts: CompiledParts | None, args: tuple[object, ...], kwargs: dict[str, object]
) -> Rehearsal:
    """Run the module without data. What needs data (a branch on a value) raises CannotRehearse."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    found = Rehearsal()
    rewind = _remember_all(module)
    try:
        args, kwargs = map_tensors(mode.from_tensor, (args, kwargs))
        with ExitStack() as stack:
            stack.enter_context(mode)
            stack.enter_context(_without_hooks(module))
            if parts is not None:
                stack.enter_context(_noting(parts, found.calls))
            found.output = module(*args, **kwargs)
    except _needs_data() as error:
        raise CannotRehearse(str(error)) from error
    finally:
        rewind()
    return found


def _needs_data() -> tuple[type[Exception], ...]:
    """What torch raises where a fake tensor will not do: it has no values, and some operators know nothing of it."""
    from torch._subclasses import fake_tensor
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedFakeTensorException,
        fake_tensor.UnsupportedOperatorException,
        GuardOnDataDependentSymNode,
        NotImplementedError,
    )


@contextmanager
def _noting(parts: CompiledParts, calls: list[PartCall]) -> Iterator[None]:
    """In the place of each part its eager self runs, and its calls are noted."""

    def instead_of(part: CompiledPart) -> Callable[..., Value]:
        def call(*args: Value, **kwargs: Value) -> Value:
            calls.append(PartCall(part, args, kwargs))
            return part.eager(*args, **kwargs)

        return call

    before = [part.put(instead_of(part)) for part in parts.parts]
    try:
        yield
    finally:
        for part, call in zip(parts.parts, before, strict=True):
            part.put(call)


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    before = [(part, name, part.__dict__[name]) for part in module.modules() for name in names if part.__dict__[name]]
    for part, name, _ in before:
        part.__dict__[name] = OrderedDict()
    try:
        yield
    finally:
        for part, name, hooks in before:
            part.__dict__[name] = hooks


def compile_calls(calls: list[PartCall]) -> list[tuple[int, Exception]]:
    """Compile each part for what it was called with; what was raised, with the stage: its first microbatch will tell more."""
    failed: list[tuple[int, Exception]] = []
    for call in calls:
        if any(part._backward_hooks or part._backward_pre_hooks for part in call.part.module.modules()):
            continue  # torch.compile traces it in pieces, so that its forward hooks would be called with what is no data
        args, kwargs = map_tensors(_blank, (call.args, call.kwargs))
        rewind = _remember_all(call.part.module)
        try:
            with only_compiling():
                call.part.told_if_untraced(args, kwargs)
        except CompiledAhead:
            pass
        except Exception as error:  # noqa: BLE001  the code of the user: it may run with data
            failed.append((call.stage, error))
        finally:
            rewind()
    return failed


def _remember_all(module: nn.Module) -> Callable[[], None]:
    """The random state, the buffers, and the numbers and texts that the modules keep, as a function that brings them back."""
    rewind = remember(module, ())
    plain = [
        (part, {name: value for name, value in part.__dict__.items() if isinstance(value, _PLAIN)})
        for part in module.modules()
    ]

    def rewind_all() -> None:
        rewind()
        for part, values in plain:
            part.__dict__.update(values)

    return rewind_all


_PLAIN = (type(None), bool, int, float, str, tuple)


def _blank(fake: Tensor) -> Tensor:
    """Zeros that look like this."""
    made = torch.empty_strided(tuple(fake.shape), fake.stride(), dtype=fake.dtype, device=fake.device).zero_()
    return made.requires_grad_(fake.requires_grad)
