"""The user's own autograd functions, kept whole.

Export looks into ``Square.apply(x)`` and forgets that its backward is its own: a captured model would train with other
gradients than the model. So, while a model is traced, such a call leaves one node, which in the stages calls the
function itself. Hooks on gradients cannot be kept; they are refused.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch import utils as functorch_utils
from torch.autograd import Function
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import checkpoint

from penstock.capture.marks import CHECKPOINT_BEGIN, CHECKPOINT_END, mark
from penstock.errors import CaptureError

_library = torch.library.Library("penstock", "FRAGMENT")
_library.define("function(str number, Tensor[] tensors) -> Tensor[]")
_operator = torch.ops.penstock.function.default


@dataclass(frozen=True)
class Applied:
    """A call of an autograd function, as an operator of a stage: takes its tensors, returns a tuple of tensors."""

    function: type[Function]
    arguments: tuple[Any, ...]  # with None where a tensor goes
    places: tuple[int, ...]  # of the tensors

    def __call__(self, *tensors: Tensor) -> tuple[Any, ...]:
        values = list(self.arguments)
        for place, tensor in zip(self.places, tensors, strict=True):
            values[place] = tensor
        result = self.function.apply(*values)
        return result if isinstance(result, tuple) else (result,)

    @property
    def __name__(self) -> str:
        return f"{self.function.__name__}_apply"

    def __str__(self) -> str:
        return f"{self.function.__module__}.{self.function.__qualname__}.apply{self.arguments}"


_calls: dict[str, Applied] = {}  # of the trace that is going on
_running: list[str] = []  # functions that are being looked into, and are to run as they are


def _shapes(number: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    name = _calls[number].function.__qualname__
    versions = [tensor._version for tensor in tensors]
    _running.append(number)
    try:
        with torch.no_grad():
            results = _calls[number](*tensors)
    finally:
        _running.pop()
    others = [type(result).__name__ for result in results if not isinstance(result, Tensor)]
    if others:
        raise CaptureError(
            f"{name} returns a {others[0]} beside its tensors; a captured model can call autograd functions that return "
            "tensors only"
        )
    if versions != [tensor._version for tensor in tensors]:
        raise CaptureError(f"{name} writes to what it is given; let its forward make a new tensor")
    return [torch.empty_like(result) for result in results]


torch.library.register_fake("penstock::function", _shapes, lib=_library)


@contextmanager
def watching_functions() -> Iterator[None]:
    """While open, calls of autograd functions that are not torch's own leave one node each."""
    original = Function.__dict__["apply"]
    unwrap = functorch_utils.unwrap_dead_wrappers

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if cls is checkpoints.CheckpointFunction:  # what torch calls reentrant: the same here as the other kind
            mark(CHECKPOINT_BEGIN)
            result = args[0](*args[2:])
            mark(CHECKPOINT_END)
            return result
        if _running or _of_torch(cls):
            return original.__func__(cls, *args, **kwargs)
        return _left(cls, inspect.signature(cls.forward).bind(*args, **kwargs).args if kwargs else args)

    def unwrapped(args: Any) -> Any:
        cls = sys._getframe(1).f_locals.get("cls")
        if not _running and isinstance(cls, type) and issubclass(cls, Function) and not _of_torch(cls):
            raise CaptureError(
                f"{cls.__qualname__}.apply was taken from its class before the capture, and its backward would be lost; "
                f"write {cls.__name__}.apply(...) where it is called"
            )
        return unwrap(args)

    def hooked(tensor: Tensor, hook: object) -> Any:
        raise CaptureError(
            "a gradient hook on a tensor inside forward would be lost; let an autograd function do what it does (its own "
            "backward is kept), or put the hook on a parameter"
        )

    _calls.clear()
    register_hook = Tensor.register_hook
    Tensor.register_hook = hooked  # type: ignore[method-assign]
    Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    functorch_utils.unwrap_dead_wrappers = unwrapped
    try:
        yield
    finally:
        Tensor.register_hook = register_hook  # type: ignore[method-assign]
        Function.apply = original  # type: ignore[method-assign]
        functorch_utils.unwrap_dead_wrappers = unwrap


def refuse_backward_hooks(model: nn.Module) -> None:
    """A stage calls operators, not modules: it would never run these."""
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"{name or 'the model'} ({type(module).__name__}) has a backward hook, which a captured stage would not run; "
                "remove it before the capture, put hooks on parameters (these are kept), or build the stages from modules: "
                "penstock.split_modules"
            )


def _left(cls: type[Function], args: tuple[object, ...]) -> Any:
    places = tuple(i for i, arg in enumerate(args) if isinstance(arg, Tensor))
    rest = tuple(None if isinstance(arg, Tensor) else arg for arg in args)
    if any(isinstance(leaf, Tensor | torch.SymInt) for leaf in pytree.tree_leaves(rest)):
        raise CaptureError(
            f"{cls.__qualname__}.apply is given tensors inside containers, or a size that may change; give it tensors and "
            "fixed values"
        )
    number = str(len(_calls))
    _calls[number] = Applied(cls, rest, places)
    results = _operator(number, [args[place] for place in places])
    return results[0] if len(results) == 1 else tuple(results)


def _of_torch(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "torch"


def keep_functions(graph: fx.Graph) -> None:
    """Put the functions themselves into the nodes that their calls left."""
    for node in graph.nodes:
        if node.target is _operator:
            number, tensors = node.args
            node.target, node.args = _calls[str(number)], tuple(tensors)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


def addmm(bias: Tensor, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if beta == 1 and alpha == 1:
        return torch.addmm(bias, x, weight)
    return torch.addmm(bias, x, weight, beta=beta, alpha=alpha)


def checkpointed(body: Callable[..., Any], *args: object) -> Any:
    """Run a part of a stage without keeping what its backward needs; the backward computes it again."""
    return checkpoint(body, *args, use_reentrant=False)
