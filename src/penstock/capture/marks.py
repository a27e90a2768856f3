"""What a trace must notice: where the user wants the cuts, checkpoints, and autograd functions of the user's own.

    pipe_split()                                                    # a line in forward
    pipeline(model, (x,), split_spec={"layers.4": SplitPoint.BEGINNING})

Both become the same thing while the model is traced: a call of the operator ``penstock::mark``, which leaves a node in
the graph at the place where it was called and computes nothing. Named modules are watched with hooks on the skeleton that is
traced, so that neither the user's module nor its class is touched.

Export looks into ``Square.apply(x)`` and forgets that its backward is its own: a captured model would train with other
gradients than the model. So, while a model is traced, such a call leaves one node as well, which in the stages calls the
function itself. Hooks on gradients cannot be kept; they are refused.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch._functorch import utils as functorch_utils
from torch.autograd import Function
from torch.fx.node import has_side_effect
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as checkpoints

from penstock.checks import check_types
from penstock.errors import CaptureError

_library = torch.library.Library("penstock", "FRAGMENT")
_library.define("mark(str what) -> ()")
_library.define("function(int number, Tensor[] tensors) -> Tensor[]")


_library.impl("mark", lambda what: None, "CompositeExplicitAutograd")
mark = torch.ops.penstock.mark.default
has_side_effect(mark)


class Mark(NamedTuple):
    """A cut before the node at that position in a trace."""

    position: int
    what: str


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


Points = Mapping[str, frozenset[SplitPoint]]  # on which sides of which submodules to cut
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


def annotate_split_points(module: nn.Module, spec: Mapping[str, SplitPoint]) -> None:
    """Remember cuts for a later ``pipeline(module, ...)``. The module itself stays as it is.

    annotate_split_points(model, {"layers.4": SplitPoint.BEGINNING})
    """
    check_types(
        "annotate_split_points", CaptureError, module=(module, nn.Module), spec=(spec, Mapping[str, SplitPoint])
    )
    for name, point in spec.items():
        target = submodule(module, name)
        _annotated[target] = _annotated.get(target, frozenset()) | {point}


def points_of(module: nn.Module, spec: Mapping[str, SplitPoint]) -> Points:
    """The cuts remembered for the submodules of `module`, and those of a spec."""
    points = {name: _annotated[child] for name, child in module.named_modules() if child in _annotated}
    for name, point in spec.items():
        if not isinstance(point, SplitPoint):
            raise CaptureError(f"split_spec[{name!r}] is {point!r}; write SplitPoint.BEGINNING or SplitPoint.END")
        submodule(module, name)
        points[name] = points.get(name, frozenset()) | {point}
    return points


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
def watching(skeleton: nn.Module, points: Points) -> Iterator[set[str]]:
    """While open, every call of a named submodule leaves its marks. Yields the names that were called so far."""
    called: set[str] = set()

    def passed(name: str, side: SplitPoint, *_: object) -> None:
        called.add(name)
        if side in points[name]:
            mark(f"the {side.name.lower()} of {name}")

    with ExitStack() as hooks:
        for name in points:
            child = skeleton.get_submodule(name)
            before, after = partial(passed, name, SplitPoint.BEGINNING), partial(passed, name, SplitPoint.END)
            hooks.enter_context(child.register_forward_pre_hook(before, prepend=True))
            hooks.enter_context(child.register_forward_hook(after, prepend=True))
        yield called


_operator = torch.ops.penstock.function.default


@dataclass(frozen=True)
class Applied:
    """A call of an autograd function, as an operator of a stage: takes its tensors, returns a tuple of tensors."""

    function: type[Function]
    arguments: tuple[object, ...]  # with None where a tensor goes
    places: tuple[int, ...]  # of the tensors

    def __hash__(self) -> int:
        return hash(self.function)  # arguments may be lists, which have no hash

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


_calls: list[Applied] = []  # of the trace that is going on
_running: list[int] = []  # functions that are being looked into, and are to run as they are


def _shapes(number: int, tensors: Sequence[Tensor]) -> list[Tensor]:
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
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    original = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def watching_calls() -> Iterator[None]:
    """While open, calls that export would run straight through and forget leave nodes, so that the stages have them again.

    ``torch.utils.checkpoint`` leaves marks around the function that it is given; an autograd function that is not torch's own
    leaves one node. Calls in other threads, which may train another model meanwhile, are left as they are.
    """
    tracer = threading.get_ident()
    original = Function.__dict__["apply"]
    unwrap = functorch_utils.unwrap_dead_wrappers
    checkpointed = checkpoints._checkpoint_without_reentrant_generator
    register_hook: Callable[..., object] = Tensor.register_hook

    def marked(*args: Any, **kwargs: Any) -> Iterator[None]:
        if threading.get_ident() != tracer:
            yield from checkpointed(*args, **kwargs)
            return
        mark(CHECKPOINT_BEGIN)
        yield
        mark(CHECKPOINT_END)

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> object:
        if threading.get_ident() != tracer:
            return original.__func__(cls, *args, **kwargs)
        if cls is checkpoints.CheckpointFunction:  # what torch calls reentrant: the same here as the other kind
            with contextmanager(marked)():
                return args[0](*args[2:])
        if _running or _of_torch(cls):
            return original.__func__(cls, *args, **kwargs)
        return _left(cls, inspect.signature(cls.forward).bind(*args, **kwargs).args if kwargs else args)

    def unwrapped(args: Any) -> Any:
        cls = sys._getframe(1).f_locals.get("cls")
        here = threading.get_ident() == tracer and not _running
        if here and isinstance(cls, type) and issubclass(cls, Function) and not _of_torch(cls):
            raise CaptureError(
                f"{cls.__qualname__}.apply was taken from its class before the capture, and its backward would be lost; "
                f"write {cls.__name__}.apply(...) where it is called"
            )
        return unwrap(args)

    def hooked(tensor: Tensor, hook: Any) -> object:
        if threading.get_ident() != tracer:
            return register_hook(tensor, hook)
        raise CaptureError(
            "a gradient hook on a tensor inside forward would be lost; let an autograd function do what it does (its own "
            "backward is kept), or put the hook on a parameter"
        )

    _calls.clear()
    with (
        _replaced(checkpoints, "_checkpoint_without_reentrant_generator", marked),
        _replaced(Tensor, "register_hook", hooked),
        _replaced(Function, "apply", classmethod(apply)),
        _replaced(functorch_utils, "unwrap_dead_wrappers", unwrapped),
    ):
        yield


def refuse_backward_hooks(model: nn.Module) -> None:
    """A stage calls operators, not modules: it would never run these."""
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"{name or 'the model'} ({type(module).__name__}) has a backward hook, which a captured stage would not run; "
                "remove it before the capture, put hooks on parameters (these are kept), or build the stages from modules: "
                "penstock.split_modules"
            )


def _left(cls: type[Function], args: tuple[object, ...]) -> object:
    places = tuple(i for i, arg in enumerate(args) if isinstance(arg, Tensor))
    rest = tuple(None if isinstance(arg, Tensor) else arg for arg in args)
    if any(isinstance(leaf, Tensor | torch.SymInt) for leaf in pytree.tree_leaves(rest)):
        raise CaptureError(
            f"{cls.__qualname__}.apply is given tensors inside containers, or a size that may change; give it tensors and "
            "fixed values"
        )
    _calls.append(Applied(cls, rest, places))
    results = _operator(len(_calls) - 1, [args[place] for place in places])
    return results[0] if len(results) == 1 else tuple(results)


def _of_torch(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "torch"


def keep_functions(graph: fx.Graph) -> None:
    """Put the functions themselves into the nodes that their calls left."""
    for node in graph.nodes:
        if node.target is _operator:
            number, tensors = node.args
            node.target, node.args = _calls[number], tuple(tensors)
