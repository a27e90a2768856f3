"""A stage run without data, to learn what it gives and with what its compiled parts are called; and their compilation.

    output, calls = rehearse(module, parts, (x,), {})   # fake tensors: shapes, types and nothing else
    for call in calls:
        call.compile()                  # the part is compiled for what it would be called with; its graphs are not run

Hooks are left out of it. Gradients, buffers, random numbers and what modules keep in attributes (a counter, a mask) are as
they were afterwards; the Python code of `forward` runs.

Code keeps what it has computed once: a mask in an attribute, in a dictionary, behind `functools.cache`. A fake tensor in such a
place would make all later results fake. So attributes are put back, and what follows neither from an input nor from what the
module holds, or from its shape alone, is computed as ever and is no fake: that is what caches outside of modules have. Code that
keeps more than that there is found out when its first microbatch comes (`refuse_fake`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

from penstock.errors import StageError
from penstock.nest import Value, map_tensors, tensors_in
from penstock.stage.buffers import InPlace, attributes_of, memory_of, remember
from penstock.stage.compiled import on_call
from penstock.stage.twins import HOOKS, CompiledPart, CompiledParts

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

_aten = torch.ops.aten
_READ = _aten._local_scalar_dense.default  # the value of a tensor, for Python
_FROM_SHAPES = frozenset(  # what these give depends on the shape, the type and the device of what they are given
    getattr(_aten, name).default
    for name in ("new_empty", "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like")
)


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
            with _without_data(module) as mode:
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
def _without_data(module: nn.Module) -> Iterator[FakeTensorMode]:
    """While this is open nothing is computed from fake tensors and from those that `module` holds, which stay as they are."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    kept = (value for part in module.modules() for value in tree_leaves(list(part.__dict__.values())))
    held = {memory_of(value) for value in kept if not is_traceable_wrapper_subclass(value)} - {0}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, _RealWithoutInputs(mode, held):
        yield mode


class _RealWithoutInputs(TorchDispatchMode):
    """Operators that are given neither a fake tensor nor one that is `held` run as ever."""

    supports_higher_order_operators = True

    def __init__(self, mode: FakeTensorMode, held: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode, self.held = mode, held

    def __torch_dispatch__(self, func: Value, types: object, args: Value = (), kwargs: Value = None) -> Value:
        from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

        kwargs = kwargs or {}
        if func in _FROM_SHAPES:
            with unset_fake_temporarily():
                return func(*tree_map_only(FakeTensor, _like, args), **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not isinstance(func, torch._ops.OpOverload) or any(isinstance(tensor, FakeTensor) for tensor in given):
            return func(*args, **kwargs)
        if any(memory_of(tensor) in self.held for tensor in given) and func is not _READ:
            args, kwargs = tree_map_only(Tensor, self.mode.from_tensor, (args, kwargs))
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            return func(*args, **kwargs)


@contextmanager
def _rewound(module: nn.Module) -> Iterator[None]:
    """Afterwards the random state, the buffers, and what the modules have set on themselves, are as they were.

    >>> counter = nn.Identity()
    >>> counter.calls, counter.seen = 0, []
    >>> with _rewound(counter):
    ...     counter.calls, counter.mask = 1, torch.ones(2)
    ...     counter.seen.append(3)
    >>> counter.calls, counter.seen, hasattr(counter, "mask")
    (0, [], False)
    """
    attributes = attributes_of(module.modules())
    changed = InPlace((), module.modules())
    rest = remember(module, ())
    try:
        yield
    finally:
        attributes.put_back()
        changed.put_back()
        rest()


def _like(fake: Tensor) -> Tensor:
    """Memory that looks like this."""
    return torch.empty_strided(tuple(fake.shape), fake.stride(), dtype=fake.dtype, device=fake.device)


def _blank(fake: Tensor) -> Tensor:
    """Zeros that look like this."""
    return _like(fake).zero_().requires_grad_(fake.requires_grad)


def refuse_fake(output: Value, stage: int) -> None:
    """After a forward with data, in the step of a rehearsal: what it gives must have data, too."""
    from torch._subclasses.fake_tensor import FakeTensor

    if any(isinstance(tensor, FakeTensor) for tensor in tensors_in(output)):
        raise StageError(
            f"stage {stage} gave a tensor without data: it keeps something outside of its modules, in a global dictionary "
            "perhaps, that was computed from its input in the run that finds shapes before stages are compiled. Keep it in an "
            "attribute of a module, or compute it in every forward, and start the program again"
        )
