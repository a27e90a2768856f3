"""While a stage of a split plan runs, `torch.nn.functional.linear` and `torch.addmm` defer their weight gradients.

>>> from penstock.stage.deferred import Deferral
>>> deferral, layer, x = Deferral(), torch.nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
>>> pending = Pending(deferral)
>>> previous = begin(pending)
>>> y = layer(x)
>>> end(previous)
>>> pending
Pending(phase='forward', calls=1, work=0)

The functions are swapped from `begin` to `end` (counted, so that blocks may nest and overlap) and act only
in the thread that opened it, on leaf parameters of plain type, outside of torch.compile and of functorch transforms.
Everything else goes to the original. The user's module and its parameters are not touched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.compiler import is_dynamo_compiling
from torch.nn.parameter import Parameter

from penstock.errors import StageError
from penstock.nest import Value
from penstock.stage.calls import Call, DeferredLinear, Operator, Slot, versions
from penstock.stage.deferred import Pending, say_not_deferred
from penstock.stage.engine import leaves_reached

_C: Any = torch._C
_saved_tensor_hooks = _C._autograd._top_saved_tensors_default_hooks
_functorch_level = _C._functorch.maybe_current_level
_KEY = "penstock.stage.pending"


class _Original:
    """What stands in the places of the functions here, outside of blocks."""

    linear: Callable[..., Tensor] = F.linear
    addmm: Callable[..., Tensor] = torch.addmm
    _engine_run_backward: Callable[..., Value] = torch.autograd.graph._engine_run_backward


class _Local(threading.local):
    pending: Pending | None = None
    off = False  # by `undeferred`
    held = False  # by `intercepted`


_local = _Local()
_lock = threading.Lock()
_blocks = 0
_engine_thread_blocks = 0
ROOT = torch.zeros((), requires_grad=True)  # makes a deferred call differentiable where its input is not


class NestedDifferentiation(StageError):
    """The forward of a stage differentiates through its own linear layers."""


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
    if is_dynamo_compiling():
        return _Original.linear(input, weight, bias)
    pending = _local.pending
    if pending is None and (not _engine_thread_blocks or (pending := _of_engine_thread()) is None):
        return _Original.linear(input, weight, bias)
    slot = pending.slots[pending.index]
    if (
        slot.weight is weight
        and slot.bias is bias
        and slot.shape == input.shape
        and slot.cast is None
        and not slot.transposed
        and weight.requires_grad
        and type(input) is Tensor
        and weight.data_ptr() == slot.weight_pointer
        and (bias is None or bias.data_ptr() == slot.bias_pointer)
        and _saved_tensor_hooks(True) is None
        and _functorch_level() is None
    ):
        if slot.rows_shape is None:
            rows, output = input, _Original.linear(input, slot.frozen, slot.anchor)
        else:
            output, rows = slot.apply(_Original.linear, input)
        if output.dtype is slot.dtype:  # else autocast has been switched on
            if output.requires_grad:
                pending.index += 1
                pending.records += (slot, rows, rows._version)
            return output
    return _defer(pending, input, weight, bias=bias, transposed=False)


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **kwargs: object) -> Tensor:  # noqa: A002
    if is_dynamo_compiling():
        return _Original.addmm(input, mat1, mat2, **kwargs)
    pending = _local.pending
    if pending is None and (not _engine_thread_blocks or (pending := _of_engine_thread()) is None):
        return _Original.addmm(input, mat1, mat2, **kwargs)
    if kwargs:
        return _Original.addmm(input, mat1, mat2, **kwargs)
    return _defer(pending, mat1, mat2, bias=input, transposed=True)


# When inductor is imported it names kernels after the functions that it finds, and these names go into its cache on disk.
_linear.__name__, _addmm.__name__ = "linear", "addmm"


def _addmm_operator(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _Original.addmm(bias, rows, weight)


def _of_engine_thread() -> Pending | None:
    if _local.off:
        return None
    return _C._get_obj_in_tls(_KEY) if _C._is_key_in_tls(_KEY) else None


def _parameter(tensor: Tensor) -> Tensor:
    """The parameter that `tensor` stands for.

    A checkpoint whose function takes weights as arguments gets new tensors for them when it runs again under saved-tensor hooks
    (an offloaded stage): leaves that accumulate into the parameter. What was deferred in the forward is deferred then too.
    """
    if type(tensor) is not Tensor or not tensor.requires_grad or not tensor.is_leaf or _functorch_level() is not None:
        return tensor
    found: Tensor = get_gradient_edge(tensor).node.variable  # type: ignore[attr-defined]
    return found


def _deferrable(pending: Pending, x: Tensor, call: Call) -> bool:
    weight, bias, transposed = call
    if type(weight) is not Parameter or not weight.requires_grad or not torch.is_grad_enabled():
        if hasattr(weight, "placements") and weight.requires_grad:
            say_not_deferred("tensor-parallel weights (DTensor)")
        return False
    return (
        type(x) in (Tensor, Parameter)
        and id(weight) not in pending.skip
        and weight.is_leaf
        and _functorch_level() is None
        and (weight.dim() == 2 and weight.layout is torch.strided and weight.is_floating_point() and weight.numel() > 0)
        and (x.dim() >= 2 and x.shape[-1] == weight.shape[0 if transposed else 1] and x.device == weight.device)
        and (bias is None or type(bias) is Parameter or (type(bias) is Tensor and not bias.requires_grad))
        and (bias is None or bias.shape == (weight.shape[1:] if transposed else weight.shape[:1]))
        and (bias is None or not bias.requires_grad or id(bias) not in pending.skip)
    )


def _autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    kind = tensor.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _defer(pending: Pending, x: Tensor, weight: Tensor, *, bias: Tensor | None, transposed: bool) -> Tensor:
    """Every case that the short way of `_linear` does not know."""
    operator: Operator = _addmm_operator if transposed else _Original.linear
    weight, bias = _parameter(weight), None if bias is None else _parameter(bias)
    call = Call(weight, bias, transposed)  # type: ignore[arg-type]
    if not _deferrable(pending, x, call):
        return operator(x, weight, bias)
    cast = _autocast_dtype(weight)
    dtypes = {tensor.dtype for tensor in (x, weight, bias) if tensor is not None}
    if (len(dtypes) > 1 and cast is None) or (torch.float64 in dtypes and cast is not None):
        return operator(x, weight, bias)
    if dtypes == {cast}:
        cast = None
    if not weight.is_cpu or _saved_tensor_hooks(True) is not None:
        if cast is None:
            frozen, plain = weight.detach(), None if bias is None else bias.detach()
        else:
            once = pending.deferral.cast
            x, frozen, plain = x.to(cast), once(weight, cast), None if bias is None else once(bias, cast)
        pending.functions.append(call)
        pending.deferral.news = True
        return DeferredLinear.apply(x, ROOT, frozen, plain, call, pending.work, operator)  # type: ignore[no-any-return,no-untyped-call]
    slot = pending.slots[pending.index]
    if not _matches(slot, x, call, cast=cast):
        slot = Slot(call, x, cast=cast)
        pending.deferral.place(slot, at=pending.index, slots=pending.slots)
    output, rows = slot.apply(operator, x)
    pending.index += 1
    pending.records += (slot, rows, rows._version)
    return output


def _matches(slot: Slot, x: Tensor, call: Call, *, cast: torch.dtype | None) -> bool:
    weight, bias, transposed = call
    return (
        slot.weight is weight
        and slot.bias is bias
        and slot.transposed is transposed
        and slot.shape == x.shape
        and slot.cast is cast
        and slot.weight_pointer == weight.data_ptr()
        and (bias is None or slot.bias_pointer == bias.data_ptr())
        and (cast is None or slot.versions == versions(weight, bias))
    )


def _engine(
    roots: Value, grads: Value, keep: bool, create: bool, inputs: Value, *rest: Value, **kwargs: Value
) -> Value:
    """Differentiation inside a forward or an input pass: let it be, unless it needs a weight that is deferred."""
    pending = _local.pending
    if pending is not None and _functorch_level() is None:
        deferred = {id(tensor) for call in pending.calls() for tensor in call[:2]}
        asked = {id(tensor) for tensor in inputs}
        if create or deferred & asked or (not asked and pending.phase == "forward"):
            anchors = {id(anchor) for anchor in pending.anchors()} | {id(ROOT)}
            if leaves_reached([root for root in roots if isinstance(root, Tensor)]) & anchors:
                raise NestedDifferentiation(
                    "this stage differentiates inside itself (torch.autograd.grad or backward, in a forward or in "
                    "a custom backward) through linear layers whose weight gradients a split backward puts off. "
                    "Use a schedule with full backwards, or set `enabled = False` on the stage's Deferral"
                )
    return _Original._engine_run_backward(roots, grads, keep, create, inputs, *rest, **kwargs)


@contextmanager
def intercepted() -> Iterator[None]:
    """Keep the functions swapped, so that the blocks of this thread within need not: put it around a whole step."""
    held = _local.held
    if not held:
        _swap()
        _local.held = True
    try:
        yield
    finally:
        if not held:
            _local.held = False
            _restore()


_PLACES = ((F, "linear", _linear), (torch, "addmm", _addmm), (torch.autograd, "_engine_run_backward", _engine))


def _swap() -> None:
    global _blocks
    with _lock:
        for home, name, here in () if _blocks else _PLACES:
            setattr(_Original, name, getattr(home, name))
            setattr(home, name, here)
        _blocks += 1


def _restore() -> None:
    global _blocks
    with _lock:
        _blocks -= 1
        for home, name, here in () if _blocks else _PLACES:
            if getattr(home, name) is here:  # else someone else has replaced it in the meantime
                setattr(home, name, getattr(_Original, name))


def current() -> Pending | None:
    """The weight work of the microbatch whose forward or input pass runs in this thread, or on its behalf; None if none does."""
    pending = _local.pending
    if pending is None and _engine_thread_blocks:
        pending = _of_engine_thread()
    return pending


def begin(pending: Pending) -> Pending | None:
    """From here on linear layers called by this thread leave their weight work in `pending`. Hand what it returns to `end`."""
    if not _local.held:
        _swap()
    pending.deferred = True
    previous = _local.pending
    _local.pending = pending
    return previous


def end(previous: Pending | None) -> None:
    """Close the block that returned `previous`."""
    _local.pending = previous
    if not _local.held:
        _restore()


@contextmanager
def undeferred() -> Iterator[None]:
    """Within the block, linear layers called by this thread do all of their backward at once."""
    previous = _local.pending, _local.off
    _local.pending, _local.off = None, True
    try:
        yield
    finally:
        _local.pending, _local.off = previous


@contextmanager
def visible_to_engine_threads(pending: Pending) -> Iterator[None]:
    """Devices run their backward in threads of the engine, which see what is stashed here."""
    global _engine_thread_blocks
    with _lock:
        _engine_thread_blocks += 1
    _C._stash_obj_in_tls(_KEY, pending)
    try:
        yield
    finally:
        _C._remove_obj_from_tls(_KEY)
        with _lock:
            _engine_thread_blocks -= 1
