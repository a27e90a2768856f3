"""The arguments of the model: bound by name, flattened, checked against what was captured.

    table = InputTable.of(model.forward, (x,), {"mask": m})
    table.bind((x2,), {"mask": m2})        # [x2, m2]; the same however they are passed

A leaf is called as a user would write it: ``x``, ``batch.ids``, ``states[0]``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import Dim

from penstock.errors import CaptureError
from penstock.nest import (
    Kind,
    Nest,
    Nesting,
    Node,
    Trail,
    has_tensor,
    leaf_names,
    named,
    open_node,
    open_object,
    spelled,
)

Dims = tuple[Any, ...]  # for each leaf: None, or {dimension: Dim}
ModelCall = tuple[Sequence[Any], Mapping[str, Any]]  # the positional and the keyword arguments of one call


class _ModelValues(Nesting):
    """Sees tensors and traced sizes, also in the attributes of objects that nobody registered, such as caches."""

    leaf_types = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)

    def opened(self, value: Any) -> Node | None:
        node = open_node(value)
        if node is not None and node.kind not in (Kind.DATACLASS, Kind.COPY):
            return node
        return None if callable(value) or isinstance(value, dict | list | tuple) else open_object(value)

    def constant(self, value: Any, trail: Trail) -> Nest:
        if isinstance(value, dict | list | tuple) and has_tensor(value):
            raise CaptureError(
                f"{spelled(trail)} is a {type(value).__qualname__} with tensors in it, and nothing says how to make another "
                "one: give a plain dict, list or tuple, or register it with torch.utils._pytree.register_pytree_node"
            )
        return Nest(Kind.CONSTANT, value)


model_values = _ModelValues()


@dataclass(frozen=True)
class Parameter:
    """One parameter of the signature, as far as the capture used it."""

    name: str
    kind: str  # "by position", "by either", "by name", "rest" (*args) or "named rest" (**kwargs)
    recipe: Nest
    leaves: tuple[int, ...]


_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "by position",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "by either",
    inspect.Parameter.KEYWORD_ONLY: "by name",
    inspect.Parameter.VAR_POSITIONAL: "rest",
    inspect.Parameter.VAR_KEYWORD: "named rest",
}


@dataclass(frozen=True)
class InputTable:
    """The model's arguments at capture: which parameters were given, and which leaf stands where."""

    parameters: tuple[Parameter, ...]
    names: tuple[str, ...]  # of the leaves, in order
    order: tuple[tuple[str, str], ...]  # all parameters of the signature: (name, kind)
    given: tuple[str, ...]  # the arguments with tensors in them, as they were given: by position, then by name
    as_given: bool = False  # whether positions in a call count these, and not the parameters of the signature

    @staticmethod
    def of(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[InputTable, list[Any]]:
        """The table of one call, and the leaves of that call."""
        signature = inspect.signature(forward)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise CaptureError(
                f"the example arguments do not fit forward{signature}: {error}. "
                "Give mb_args and mb_kwargs as the model would be called with one microbatch"
            ) from None
        leaves: list[Any] = []
        parameters = []
        names: list[str] = []
        for name, value in bound.arguments.items():
            kind = _KINDS[signature.parameters[name].kind]
            own, recipe = model_values.flatten(value, name)
            places = tuple(range(len(leaves), len(leaves) + len(own)))
            parameters.append(Parameter(name, kind, recipe, places))
            names += leaf_names(recipe, "" if kind == "named rest" else name)
            leaves += own
        order = tuple((p.name, _KINDS[p.kind]) for p in signature.parameters.values())
        tensors = {p.name for p in parameters if p.leaves and p.kind != "named rest"} | set(names)
        by_position = [name for name in bound.arguments if name not in kwargs][: len(args)]
        given = tuple(name for name in (*by_position, *kwargs) if name in tensors)
        return InputTable(tuple(parameters), tuple(names), order, given), leaves

    def call(self, function: Callable[..., Any], leaves: Sequence[Any]) -> Any:
        """Call `function` as the model was called at capture, with other leaves."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        skipped = False
        given = {p.name: p for p in self.parameters}
        for name, kind in self.order:
            if name not in given:
                skipped = True
                continue
            value = model_values.unflatten(given[name].recipe, [leaves[i] for i in given[name].leaves])
            if kind == "rest":
                args += value
            elif kind == "named rest":
                kwargs |= value
            elif kind == "by name" or (kind == "by either" and skipped):
                kwargs[name] = value
            else:
                args.append(value)
        return function(*args, **kwargs)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, partial: bool = False) -> dict[str, Any]:
        """The leaves of a call, by name.

        With `partial`, arguments may be missing: a rank gives only what its stages read.
        """
        values = self._by_parameter(args, kwargs)
        found: dict[str, Any] = {}
        for parameter in self.parameters:
            if parameter.name not in values:
                if not partial and parameter.leaves:
                    raise CaptureError(f"argument {parameter.name!r} is missing; the model was captured with it")
                continue
            found |= self._leaves(parameter, values.pop(parameter.name))
        for name, value in values.items():
            if value is not None and not partial:
                raise CaptureError(
                    f"argument {name!r} was not given when the model was captured, so no stage reads it; "
                    f"capture with it, or leave it out. Captured: {', '.join(p.name for p in self.parameters)}"
                )
        return found

    def bind_each(self, calls: Sequence[ModelCall]) -> list[dict[str, Any]]:
        """The leaves of several calls of one form, each as far as it is given. The first is bound with all checks; in the
        others tensors may differ, and what else differs is bound again."""
        first = self.bind(*calls[0], partial=True)
        names = self._positions(len(calls[0][0]))
        return [
            first,
            *(self._like(first, names, calls[0], call) or self.bind(*call, partial=True) for call in calls[1:]),
        ]

    def _positions(self, count: int) -> list[str]:
        """What the leaves are called that stand in the first places of a call."""
        if self.as_given and not any(kind == "rest" for _, kind in self.order):
            return list(self._by_name([None] * count, {}))
        names = [name for name, kind in self.order if kind in ("by position", "by either")][:count]
        rest = next((name for name, kind in self.order if kind == "rest"), "")
        return names + [f"{rest}[{i}]" for i in range(count - len(names))]

    @staticmethod
    def _like(known: dict[str, Any], names: Sequence[str], first: ModelCall, other: ModelCall) -> dict[str, Any] | None:
        """The leaves of a call that differs from the first in nothing but tensors; None for any other."""
        (args, kwargs), (new_args, new_kwargs) = first, other
        if len(args) != len(new_args) or kwargs.keys() != new_kwargs.keys():
            return None
        found = dict(known)
        for name, old, new in zip(names, args, new_args, strict=True):
            if type(new) is torch.Tensor and type(old) is torch.Tensor:
                found[name] = new
            elif new is not old:
                return None
        for name, new in new_kwargs.items():
            if type(new) is torch.Tensor and type(kwargs[name]) is torch.Tensor:
                found[name] = new
            elif new is not kwargs[name]:
                return None
        return found

    def _by_parameter(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        rest = list(args)
        named = dict(kwargs)
        if self.as_given and not any(kind == "rest" for _, kind in self.order):
            named |= self._by_name(rest, named)
            rest = []
        for name, kind in self.order:
            if kind in ("by position", "by either") and rest:
                values[name] = rest.pop(0)
                if name in named:
                    raise CaptureError(f"argument {name!r} is given twice, by position and by name")
            elif kind in ("by either", "by name", "by position") and name in named:
                values[name] = named.pop(name)
            elif kind == "rest" and rest:
                values[name], rest = tuple(rest), []
            elif kind == "named rest" and named:
                values[name], named = named, {}
        if rest or named:
            left = [f"{len(rest)} by position"] * bool(rest) + [repr(name) for name in named]
            takes = ", ".join(name for name, _ in self.order)
            raise CaptureError(f"too many arguments: {', '.join(left)} left over; the model takes ({takes})")
        return values

    def _by_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by position as arguments by name, when positions count what was given at the capture."""
        if len(args) > len(self.given):
            raise CaptureError(
                f"{len(args)} arguments by position; the model was captured with {', '.join(self.given)}"
            )
        twice = [name for name in self.given[: len(args)] if name in kwargs]
        if twice:
            raise CaptureError(f"argument {twice[0]!r} is given twice, by position and by name")
        return dict(zip(self.given, args, strict=False))

    def _leaves(self, parameter: Parameter, value: Any) -> dict[str, Any]:
        leaves, recipe = model_values.flatten(value, parameter.name)
        names = [self.names[i] for i in parameter.leaves]
        name = "" if parameter.kind == "named rest" else parameter.name
        paths = leaf_names(recipe, name)
        if paths != names:
            raise CaptureError(
                f"argument {parameter.name!r} was captured with the tensors {names}, and is called with {paths}; "
                "a captured model takes the same structure that it was captured with"
            )
        for (path, old), (_, new) in zip(named(parameter.recipe, name), named(recipe, name), strict=True):
            if old.kind is Kind.CONSTANT and not same(old.data, new.data):
                raise CaptureError(
                    f"{path} was {old.data!r} when the model was captured, and is {new.data!r} now; capture again"
                )
        return dict(zip(names, leaves, strict=True))


def same(old: Any, new: Any) -> bool:
    """Whether two arguments that are not tensors count as the same."""
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    result = old == new
    return bool(result) if isinstance(result, bool) else True


def batch_dims(leaves: Sequence[torch.Tensor]) -> Dims:
    """The first dimension of every tensor that has the size of the batch there."""
    batch = next((leaf.shape[0] for leaf in leaves if leaf.ndim), None)
    if batch is None or batch < 2:
        return tuple(None for _ in leaves)
    return tuple({0: Dim.AUTO} if leaf.ndim and leaf.shape[0] == batch else None for leaf in leaves)


def why_static(leaves: Sequence[torch.Tensor]) -> str:
    """Why the batch size of this example cannot be kept open, if so."""
    batch = next((leaf.shape[0] for leaf in leaves if leaf.ndim), None)
    return (
        "the example has a batch of 1; capture with an example of at least 2 to keep the batch size open"
        if batch == 1
        else ""
    )


def given_dims(table: InputTable, leaves: Sequence[torch.Tensor], spec: Mapping[str, Any]) -> Dims:
    """What the user said, leaf by leaf: by argument, or by the name of a leaf."""
    found: list[Any] = [None] * len(leaves)
    known = {p.name for p in table.parameters} | set(table.names)
    for name, value in spec.items():
        if name not in known:
            raise CaptureError(f"dynamic_shapes names {name!r}; the arguments are {', '.join(table.names)}")
        if name in table.names:
            found[table.names.index(name)] = _normal(value, leaves[table.names.index(name)], name)
    for parameter in table.parameters:
        if parameter.name in spec and parameter.name not in table.names:
            _walk(parameter.recipe, spec[parameter.name], iter(parameter.leaves), leaves, found)
    return tuple(found)


def _walk(nest: Nest, spec: Any, places: Iterator[int], leaves: Sequence[torch.Tensor], found: list[Any]) -> None:
    if nest.kind is Kind.LEAF:
        place = next(places)
        found[place] = _normal(spec, leaves[place], f"leaf {place}")
    elif nest.children:
        parts = (
            [None] * len(nest.children) if spec is None else list(spec.values() if isinstance(spec, Mapping) else spec)
        )
        if len(parts) != len(nest.children):
            raise CaptureError(f"dynamic_shapes has {len(parts)} entries for a container of {len(nest.children)}")
        for child, part in zip(nest.children, parts, strict=True):
            _walk(child, part, places, leaves, found)


def _normal(spec: Any, leaf: torch.Tensor, name: str) -> dict[int, Any] | None:
    if spec is None:
        return None
    entries = dict(spec) if isinstance(spec, Mapping) else dict(enumerate(spec))
    for dim in entries:
        if not 0 <= dim < leaf.ndim:
            raise CaptureError(
                f"dynamic_shapes[{name!r}] names dimension {dim}; the example has {leaf.ndim} dimensions"
            )
    return {dim: what for dim, what in entries.items() if what is not None} or None
