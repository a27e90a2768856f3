"""Find out how a loss function scales with its rows, and which labels a cross entropy inside it counts.

    if depends_on_arguments_alone(loss_fn):
        with aside(loss_fn, output):
            labels_of(loss_fn, output, target, {})    # the call of cross_entropy that it returns, or None
            adds_up(loss_fn, output, target, {})      # flags: twice the rows give twice the loss

Both call the function once more, so they are for functions that name nothing but operators of torch, constants, and functions
like themselves. Variables that such a function sets are put back, and it gets copies of its arguments; one that changes those in
place is left alone. Of all other functions nothing is found out.
"""

from __future__ import annotations

import builtins
import functools
import math
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as of_all_modules
from torch.overrides import TorchFunctionMode

from penstock.batch.batch import precise_on
from penstock.nest import Value, map_tensors, tensors_in
from penstock.stage.buffers import RandomState, accelerators

_MODULES = (torch, nn, functional, math)
_BUILTINS = (abs, bool, enumerate, float, int, isinstance, len, max, min, range, sum, tuple, zip)
# Names of these modules and of tensors that do more than compute.
_ACTING = (
    *("backward", "compile", "cuda", "data", "distributed", "export", "grad", "hub", "init", "jit", "library", "load"),
    *("manual_seed", "ops", "parallel", "register_hook", "retain_grad", "save", "seed", "set_rng_state", "utils"),
)
_LOSSES = "torch.nn.modules.loss"
_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-5}  # relative; other types are compared with less precision
_DEPTH = 4  # of functions that call one another
_ROWS = 4  # of a microbatch, that a function is tried on


@dataclass(frozen=True)
class LabelCall:
    """A call of cross_entropy or nll_loss."""

    labels: Tensor
    ignore_index: int
    weight: Tensor | None
    reduction: str


def depends_on_arguments_alone(function: object, callers: tuple[object, ...] = ()) -> bool:
    """True if the names in the code of a function show that calling it once more does nothing but compute.

    >>> depends_on_arguments_alone(lambda output, target: ((output - target) ** 2).sum())
    True
    >>> seen = []
    >>> depends_on_arguments_alone(lambda output, target: seen.append(output) or output.sum())
    False
    """
    if isinstance(function, functools.partial):
        given = (*function.args, *function.keywords.values())
        return depends_on_arguments_alone(function.func, callers) and all(_is_fixed(one, callers) for one in given)
    if not isinstance(function, types.FunctionType) or len(callers) == _DEPTH:
        return False
    if is_function_of_torch(function) or function in callers:  # an attribute may have the name of the function itself
        return True
    callers = (*callers, function)
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    try:
        values = [*(cell.cell_contents for cell in function.__closure__ or ()), *defaults]
    except ValueError:  # a cell without a value
        return False
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    return all(_is_fixed(one, callers) for one in values) and all(
        _is_fixed(function.__globals__[name], callers)
        if name in function.__globals__
        else getattr(builtins, name, None) in _BUILTINS or _is_operator(name)
        for name in names
    )


def _is_fixed(value: object, callers: tuple[object, ...]) -> bool:
    """Whether something that a function refers to is a constant, a function like it, or one of torch's losses."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return True
    if isinstance(value, tuple):
        return all(_is_fixed(one, callers) for one in value)
    if isinstance(value, types.ModuleType):
        return value in _MODULES
    if isinstance(value, nn.Module):
        return is_loss_of_torch(value) and not has_hooks(value)
    if type(value) is Tensor:
        return not value.requires_grad
    return value is Tensor or depends_on_arguments_alone(value, callers)


def is_function_of_torch(function: object) -> bool:
    """Whether it is in torch.nn.functional, and not something around such a function that has taken its name."""
    return isinstance(function, types.FunctionType) and getattr(functional, function.__name__, None) is function


def is_loss_of_torch(value: object) -> bool:
    """Whether a value computes what one of the loss modules of torch.nn does; these have no state."""
    return isinstance(value, nn.Module) and type(value).forward.__module__ == _LOSSES


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module calls more than its forward."""
    of_all = of_all_modules._global_forward_hooks or of_all_modules._global_forward_pre_hooks
    return bool(module._forward_hooks or module._forward_pre_hooks or of_all)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _is_operator(name: str) -> bool:
    changes = name.startswith("_") or name.endswith("_") or name in _ACTING
    return not changes and any(hasattr(owner, name) for owner in (Tensor, *_MODULES, nn.Module))


class _Watching(TorchFunctionMode):
    """Notes the calls of a cross entropy, and what came of them."""

    def __init__(self, *, stop: bool) -> None:
        super().__init__()
        self.stop = stop
        self.found: list[tuple[LabelCall, Tensor | None]] = []

    def __torch_function__(
        self, func: Value, types: Value, args: tuple[Value, ...] = (), kwargs: Mapping[str, Value] | None = None
    ) -> Value:
        options = dict(kwargs or {})
        call = label_call(args[1], options) if func in (functional.cross_entropy, functional.nll_loss) else None
        if call is not None and self.stop:
            self.found.append((call, None))
            raise _Stopped
        result = func(*args, **options)
        if call is not None:
            self.found.append((call, result))
        return result


class _Stopped(Exception):
    """Leaves a function where enough is known of it."""


def label_call(labels: Value, options: Mapping[str, Value]) -> LabelCall | None:
    """What a cross entropy with these options counts; None for probabilities in place of labels, or options of old."""
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return None
    if options.get("size_average") is not None or options.get("reduce") is not None:
        return None
    return LabelCall(labels, options.get("ignore_index", -100), options.get("weight"), options.get("reduction", "mean"))


def labels_of(
    function: Callable[..., Tensor],
    output: Value,
    target: Value,
    options: Mapping[str, Value],
    *,
    only_labels: bool = False,
) -> LabelCall | None:
    """The one cross entropy whose value the function returns as it is; None: it does not, or it changes its arguments in place.

    `only_labels`: it is known to return one; then nothing behind the labels is computed. To be called `aside`.
    """
    given = map_tensors(Tensor.detach, (output, target))
    copies = given if only_labels else map_tensors(Tensor.clone, given)
    versions = [tensor._version for tensor in tensors_in(copies)]
    watching, value = _Watching(stop=only_labels), None
    try:
        with watching:
            value = function(*copies, **options)
    except _Stopped:
        pass
    except Exception:  # noqa: BLE001  what is wrong with it, its own call says
        return None
    if len(watching.found) != 1 or value is not watching.found[0][1]:
        return None
    return watching.found[0][0] if versions == [tensor._version for tensor in tensors_in(copies)] else None


def adds_up(
    function: Callable[..., Tensor], output: Value, target: Value, options: Mapping[str, Value]
) -> Tensor | None:
    """Two flags on the device of the output: whether the loss of some rows taken twice and three times is twice and three times
    as much, and whether these rows can tell (their loss is a number other than 0). None: that cannot be tried.

    To be called `aside`.
    """
    tensors = [*tensors_in(output), *tensors_in(target)]
    if not tensors or any(type(one) is not Tensor for one in tensors):
        return None
    if any(not one.dim() for one in tensors) or len({one.shape[0] for one in tensors}) != 1:
        return None

    def of_rows(times: int) -> Tensor:
        few = (map_tensors(lambda one: torch.cat([one.detach()[:_ROWS]] * times), value) for value in (output, target))
        return function(*few, **options).detach()

    try:
        losses = [of_rows(times) for times in (1, 2, 3)]
        close = max(_CLOSE.get(one.dtype, 0.02) for one in (*tensors_in(output), *losses))
        once, twice, thrice = (loss.to(precise_on(loss.device)).reshape(()) for loss in losses)
        off = torch.maximum((twice - 2 * once).abs(), (thrice - 3 * once).abs())
        known = once.isfinite() & (once != 0)
        return torch.stack([known & (off <= close * once.abs()), known])
    except Exception:  # noqa: BLE001  a function that does not take these rows
        return None


@contextmanager
def aside(function: Callable[..., Tensor], output: Value) -> Iterator[None]:
    """Call a function without a graph; random numbers, and the variables that it sets, are afterwards as they were."""
    random = RandomState(accelerators(torch.device("cpu"), list(tensors_in(output))))
    variables = [*_variables(function, _DEPTH)]
    try:
        with torch.no_grad():
            yield
    finally:
        random.set()
        for put_back in variables:
            put_back()


def _variables(function: object, depth: int) -> Iterator[Callable[[], None]]:
    """For each variable outside of a function that its code names: a call that puts back what it holds now."""
    while isinstance(function, functools.partial):
        function = function.func
    if not isinstance(function, types.FunctionType) or is_function_of_torch(function) or depth == 0:
        return
    for cell in function.__closure__ or ():
        yield functools.partial(setattr, cell, "cell_contents", cell.cell_contents)
        yield from _variables(cell.cell_contents, depth - 1)
    for name in {name for code in _codes(function.__code__) for name in code.co_names} & function.__globals__.keys():
        value = function.__globals__[name]
        yield functools.partial(function.__globals__.__setitem__, name, value)
        yield from _variables(value, depth - 1)
