"""The forward of a stage whose backward will be split."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.nest import Value
from penstock.stage.buffers import Buffers
from penstock.stage.deferred import Deferral, Pending
from penstock.stage.intercept import NestedDifferentiation, begin, deferring, end
from penstock.stage.random_state import RandomState, accelerators


def run_deferred(
    deferral: Deferral, module: Callable[..., Value], args: Sequence[object], kwargs: dict[str, object]
) -> tuple[Value, Pending]:
    """The forward of a stage whose backward will be split: its value, and the weight work that it began.

    A module that differentiates through its own layers (forces as the gradient of an energy) cannot be split. Its first
    forward shows that; it is then run again, from the same random state and the same buffers, and never split again.
    """
    if deferral.compiled is not None and not deferral.compiled.installed:
        with deferral.compiled.running():
            return run_deferred(deferral, module, args, kwargs)
    pending = Pending(deferral)
    if not deferral.enabled or not _may_need_input_gradients(args, kwargs):
        return module(*args, **kwargs), pending
    if deferral.proved:
        previous = begin(pending)
        try:
            return module(*args, **kwargs), pending
        finally:
            end(previous)
    rewind = remember(module, args)
    try:
        with deferring(pending):
            value = module(*args, **kwargs)
    except NestedDifferentiation:
        deferral.enabled = False
        rewind()
        return module(*args, **kwargs), Pending(deferral)
    deferral.proved = torch.is_grad_enabled()
    return value, pending


def _may_need_input_gradients(args: Sequence[object], kwargs: dict[str, object]) -> bool:
    """False if there is nothing to hurry for: all of the backward then waits for the weight pass, in one piece."""
    for value in args if not kwargs else (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            if value.requires_grad:
                return True
        elif not isinstance(value, _CONSTANTS):
            return True  # a nest, which is not searched
    return False


_CONSTANTS = (type(None), bool, int, float, str)


def remember(module: object, args: Sequence[object]) -> Callable[[], None]:
    """The random state and the buffers as they are now, as a function that brings them back."""
    modules = [module] if isinstance(module, torch.nn.Module) else []
    before = Buffers(modules).look(())
    tensors = [*(b for one in modules for b in one.buffers()), *(arg for arg in args if isinstance(arg, Tensor))]
    random = RandomState(accelerators(torch.device("cpu"), tensors))

    def rewind() -> None:
        random.set()
        before.put_back()

    return rewind
