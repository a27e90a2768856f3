"""The forward of a stage whose backward will be split."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.nest import Value
from penstock.stage.buffers import Buffers, RandomState, accelerators
from penstock.stage.deferred import Deferral, Pending
from penstock.stage.intercept import NestedDifferentiation, begin, end


def run_deferred(
    deferral: Deferral, module: Callable[..., Value], args: Sequence[object], kwargs: dict[str, object]
) -> tuple[Value, Pending]:
    """The forward of a stage whose backward will be split: its value, and the weight work that it began.

    A module that differentiates through its own layers (forces as the gradient of an energy) cannot be split. Its first
    forward shows that; it is then run again, from the same random state and the same buffers, and never split again.
    """
    if deferral.compiled is not None and deferral.compiled.before is None:  # the twins do not run yet
        with deferral.compiled.running():
            return run_deferred(deferral, module, args, kwargs)
    pending = Pending(deferral)
    if not deferral.enabled or not _may_need_input_gradients(args, kwargs):
        return module(*args, **kwargs), pending
    rewind = None if deferral.proved else remember(module, args)
    previous = begin(pending)
    try:
        value = module(*args, **kwargs)
        deferral.proved = deferral.proved or torch.is_grad_enabled()
        return value, pending
    except NestedDifferentiation:
        if rewind is None:
            raise
        deferral.enabled = False
    finally:
        end(previous)
    rewind()
    return module(*args, **kwargs), Pending(deferral)


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
