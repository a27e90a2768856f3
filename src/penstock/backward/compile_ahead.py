"""A stage run on placeholders, to learn what it gives and with what its compiled parts are called; and their compilation.

    output, calls = run_on_placeholders(module, compiled, (x,), {})
    for call in calls:
        call.compile()

Placeholders have the shapes and types of data: NaN in floating point, so that a value that follows from them is seen, and zeros
in other types. The run is eager and leaves hooks out. Gradients, buffers, random numbers and what modules keep in attributes
(a counter, a mask) are as they were afterwards; the Python code of `forward` runs.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from penstock.backward.compile_stage import HOOKS, CompiledStage
from penstock.backward.module_state import ModuleState
from penstock.nest import Value, map_tensors, tensors_in
from penstock.stage.buffers import Tables

_SMALL = 1 << 20  # bytes of a parameter that is not trained, up to which it is put back
_probes: list[threading.Thread] = []  # see `probe_processor`


@dataclass(frozen=True)
class PartCall:
    """A call of a compiled part on placeholders."""

    compiled: CompiledStage
    part: nn.Module
    args: tuple[Value, ...]
    kwargs: dict[str, Value]

    def compile(self) -> Exception | None:
        """Compile the part for this call; what was raised comes back: its first microbatch will tell more."""
        from functorch.compile import config  # type: ignore[import-untyped]

        if any(vars(module)[name] for module in self.part.modules() for name in HOOKS):
            return None  # they would be called with placeholders
        for probe in _probes:
            probe.join(60.0)  # else inductor asks once more
        args, kwargs = map_tensors(placeholder, (self.args, self.kwargs))
        split = self.compiled.deferral is not None
        with _rewound(self.part), config.patch(force_non_lazy_backward_lowering=True):
            try:
                with self.compiled.running(split=split):
                    self.part(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  the code of the user: it may run with data
                return error
        return None


def run_on_placeholders(
    module: nn.Module, compiled: CompiledStage | None, args: tuple[Value, ...], kwargs: dict[str, Value]
) -> tuple[Value, list[PartCall]]:
    """Run the module on placeholders: its output, and the calls of compiled parts in it."""
    calls: list[PartCall] = []

    def note(part: nn.Module, args: tuple[Value, ...], kwargs: dict[str, Value]) -> None:
        assert compiled is not None, "it has the part"
        calls.append(PartCall(compiled, part, args, kwargs))

    with _rewound(module), torch.compiler.set_stance("force_eager"):
        for inside in module.modules():
            vars(inside).update((kind, OrderedDict()) for kind in HOOKS)
        if compiled is not None:
            for part in compiled.parts:
                part.register_forward_pre_hook(note, with_kwargs=True)
        args, kwargs = map_tensors(placeholder, (args, kwargs))
        return module(*args, **kwargs), calls


def placeholder(tensor: Tensor) -> Tensor:
    """A tensor without data that looks like this."""
    value = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    return torch.full_like(tensor.detach(), value).requires_grad_(tensor.requires_grad)


def is_left_over(output: Value, given: Value) -> bool:
    """Whether a forward with data gave NaN, though nothing that it was given has any."""

    def has_nan(value: Value) -> bool:
        return any(tensor.is_floating_point() and bool(tensor.isnan().any()) for tensor in tensors_in(value))

    return has_nan(output) and not has_nan(given)


@contextmanager
def _rewound(module: nn.Module) -> Iterator[None]:
    """Afterwards random states, buffers, hooks, and what the user's modules have set on themselves, are as they were.

    >>> class Counter(nn.Identity): ...
    >>> counter = Counter()
    >>> counter.calls, counter.seen = 0, []
    >>> with _rewound(counter):
    ...     counter.calls, counter.mask = 1, torch.ones(2)
    ...     counter.seen.append(3)
    >>> counter.calls, counter.seen, hasattr(counter, "mask")
    (0, [], False)
    """
    device = next((one.device for one in module.parameters()), torch.device("cpu"))
    state = ModuleState(module, device=device)
    state.begin_step(None)
    before = state.snapshot()
    parts = list(module.modules())
    hooks = [(vars(part), {kind: vars(part)[kind] for kind in HOOKS}) for part in parts]
    held = Tables([table for part in parts for table in (part._buffers, part._parameters, part._modules)])
    frozen = [one for one in module.parameters() if not one.requires_grad and one.nbytes <= _SMALL]
    values = [one.detach().clone() for one in frozen]
    try:
        yield
    finally:
        for parameter, value in zip(frozen, values, strict=True):
            parameter.data.copy_(value)
        before.put_back()
        held.put_back()
        for attributes, tables in hooks:
            attributes.update(tables)


@cache
def probe_processor() -> None:
    """Have inductor find out beside other work, once, for which vector instructions it can build code.

    It builds and loads a small program for each kind, 2 to 3 seconds each, one after the other in the middle of its first graph,
    where ranks that share a cache wait for one another. It keeps the answers.
    """
    with suppress(ImportError, AttributeError):  # of a torch that asks in another way
        from torch._inductor import cpu_vec_isa

        known = cpu_vec_isa.x86_isa_checker()  # elsewhere than on x86 there is only one kind, if any
        for kind in cpu_vec_isa.supported_vec_isa_list:
            if all(name in known for name in str(kind).split()):
                probe = threading.Thread(target=_probe, args=(kind,), name="penstock-probe", daemon=True)
                probe.start()
                _probes.append(probe)


def _probe(kind: object) -> None:
    with suppress(Exception):  # inductor asks again where it needs the answer, and tells what is wrong
        bool(kind)
