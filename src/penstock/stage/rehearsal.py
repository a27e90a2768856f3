"""A stage run without data, to learn what it gives and with what its compiled parts are called; and their compilation.

    output, calls = rehearse(module, parts, (x,), {})   # fake tensors: shapes, types and nothing else
    for call in calls:
        call.compile()                  # the part is compiled for what it would be called with; its graphs are not run

Hooks are left out of it. Gradients, buffers, random numbers and what modules keep in attributes (a counter, a mask) are as
they were afterwards; the Python code of `forward` runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.nest import Value, map_tensors
from penstock.stage.compiled import on_call
from penstock.stage.forward import remember
from penstock.stage.no_data import remember_attributes, without_data
from penstock.stage.twins import HOOKS, CompiledPart, CompiledParts


class CannotRehearse(Exception):
    """A stage needs data to run."""


class _CompiledAhead(Exception):
    """A graph has been compiled, and is not to be run."""


@dataclass(frozen=True)
class PartCall:
    """A call of a compiled part, with fake tensors."""

    part: CompiledPart
    args: tuple[Value, ...]
    kwargs: dict[str, Value]

    def compile(self) -> Exception | None:
        """Compile the part for this; what was raised comes back: its first microbatch will tell more."""
        if any(part._backward_hooks or part._backward_pre_hooks for part in self.part.module.modules()):
            return None  # torch.compile traces it in pieces, so that its forward hooks would be called with what is no data
        args, kwargs = map_tensors(_blank, (self.args, self.kwargs))
        with _rewound(self.part.module), on_call(_stop):
            try:
                self.part.told_if_untraced(args, kwargs)
            except _CompiledAhead:
                pass
            except Exception as error:  # noqa: BLE001  the code of the user: it may run with data
                return error
        return None


def _stop() -> None:
    raise _CompiledAhead


def rehearse(
    module: nn.Module, parts: CompiledParts | None, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[Value, list[PartCall]]:
    """Run the module without data. What needs data (a branch on a value) raises CannotRehearse."""
    calls: list[PartCall] = []

    def noted(part: CompiledPart) -> Callable[..., Value]:
        """In the place of a part its eager self runs, and its calls are noted."""

        def call(*args: Value, **kwargs: Value) -> Value:
            calls.append(PartCall(part, args, kwargs))
            return part.eager(*args, **kwargs)

        return call

    with _rewound(module):
        for part in () if parts is None else parts.parts:
            part.attributes[part.place] = noted(part)
        for inside in module.modules():
            vars(inside).update((kind, OrderedDict()) for kind in HOOKS)
        try:
            with without_data(module) as mode:
                args, kwargs = map_tensors(mode.from_tensor, (args, kwargs))
                return module(*args, **kwargs), calls
        except _needs_data() as error:
            raise CannotRehearse(str(error)) from error


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
def _rewound(module: nn.Module) -> Iterator[None]:
    """Afterwards the random state, the buffers, and what the modules have set on themselves, are as they were."""
    attributes, rest = remember_attributes(module), remember(module, ())
    try:
        yield
    finally:
        attributes()
        rest()


def _blank(fake: Tensor) -> Tensor:
    """Zeros that look like this."""
    made = torch.empty_strided(tuple(fake.shape), fake.stride(), dtype=fake.dtype, device=fake.device).zero_()
    return made.requires_grad_(fake.requires_grad)
