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

from penstock.capture.model_values import model_values
from penstock.errors import CaptureError
from penstock.nest import LEAF, Kind, Nest, Value, leaf_names, named

Dims = tuple[Any, ...]  # for each leaf: None, or {dimension: Dim}
ModelCall = tuple[Sequence[Value], Mapping[str, Value]]  # the positional and the keyword arguments of one call


@dataclass(frozen=True)
class InputTable:
    """The model's arguments at capture: what was given, and which leaf stands where."""

    recipes: Mapping[str, Nest]  # of each argument
    names: tuple[str, ...]  # of the leaves, in order
    signature: inspect.Signature  # of the model's forward, without types and defaults
    given: tuple[str, ...]  # the arguments with tensors in them, as they were given: by position, then by name
    as_given: bool = False  # whether positions in a call count these, and not the parameters of the signature

    @staticmethod
    def of(
        forward: Callable[..., object], args: Sequence[Value], kwargs: Mapping[str, Value]
    ) -> tuple[InputTable, list[Value]]:
        """The table of one call, and the leaves of that call."""
        signature = inspect.signature(forward)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise CaptureError(
                f"the example arguments do not fit forward{signature}: {error}. "
                "Give mb_args and mb_kwargs as the model would be called with one microbatch"
            ) from None
        parts = {name: model_values.flatten(value, name) for name, value in _by_argument(bound).items()}
        recipes: dict[str, Nest] = {name: recipe for name, (_, recipe) in parts.items()}
        plain = inspect.Signature([inspect.Parameter(p.name, p.kind) for p in signature.parameters.values()])
        names = tuple(leaf for name, recipe in recipes.items() for leaf in leaf_names(recipe, name))
        by_position = [name for name in bound.arguments if name not in kwargs][: len(args)]
        given = tuple(name for name in (*by_position, *kwargs) if name in recipes and recipes[name].num_leaves)
        return InputTable(recipes, names, plain, given), [leaf for leaves, _ in parts.values() for leaf in leaves]

    def call(self, function: Callable[..., object], leaves: Sequence[Value]) -> Value:
        """Call `function` as the model was called at capture, with other leaves."""
        bound, left = self.signature.bind_partial(), iter(leaves)
        values = {name: model_values.unflatten(recipe, left) for name, recipe in self.recipes.items()}
        bound.arguments |= {name: values.pop(name) for name in self.signature.parameters if name in values}
        return function(*bound.args, **bound.kwargs, **values)

    def bind(self, args: Sequence[object], kwargs: Mapping[str, object], *, partial: bool = False) -> dict[str, Value]:
        """The leaves of a call, by name.

        With `partial`, arguments may be missing: a rank gives only what its stages read.
        """
        kinds = {parameter.kind for parameter in self.signature.parameters.values()}
        if self.as_given and not kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY}:
            args, kwargs = (), self._by_name(args, kwargs)
        try:
            values = _by_argument(self.signature.bind_partial(*args, **kwargs))
        except TypeError as error:
            raise CaptureError(f"{error}; the model takes {self.signature}") from None
        found: dict[str, object] = {}
        for name, recipe in self.recipes.items():
            if name in values:
                found |= _leaves(name, recipe, values.pop(name))
            elif not partial and (
                recipe.num_leaves or (recipe.data is not None and name not in self.signature.parameters)
            ):
                raise CaptureError(f"argument {name!r} is missing; the model was captured with it")
        if unknown := [name for name, value in values.items() if value is not None and not partial]:
            raise CaptureError(
                f"argument {unknown[0]!r} was not given when the model was captured, so no stage reads it; "
                f"capture with it, or leave it out. Captured: {', '.join(self.recipes)}"
            )
        return found

    def bind_each(self, calls: Sequence[ModelCall]) -> list[dict[str, object]]:
        """The leaves of several calls of one form, each as far as it is given. The first is bound with all checks; in the
        others tensors may differ, and what else differs is bound again."""
        first = self.bind(*calls[0], partial=True)
        names = {id(leaf): name for name, leaf in first.items()}
        alone = len(names) == len(first)  # else one tensor stands in several places, and does not tell which

        def like(args: Sequence[Value], kwargs: Mapping[str, Value]) -> dict[str, Value] | None:
            """The leaves of a call that differs from the first in nothing but tensors; None for any other."""
            if not alone or len(args) != len(calls[0][0]) or kwargs.keys() != calls[0][1].keys():
                return None
            found = dict(first)
            olds, news = (*calls[0][0], *calls[0][1].values()), (*args, *map(kwargs.__getitem__, calls[0][1]))
            for old, new in zip(olds, news, strict=True):
                if type(new) is torch.Tensor and type(old) is torch.Tensor:
                    if id(old) in names:
                        found[names[id(old)]] = new
                elif new is not old:
                    return None
            return found

        return [first, *(like(*call) or self.bind(*call, partial=True) for call in calls[1:])]

    def _by_name(self, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, Value]:
        """All arguments of a call by name, when positions count what was given at the capture."""
        if len(args) > len(self.given):
            raise CaptureError(
                f"{len(args)} arguments by position; the model was captured with {', '.join(self.given)}"
            )
        twice = [name for name in self.given[: len(args)] if name in kwargs]
        if twice:
            raise CaptureError(f"multiple values for argument {twice[0]!r}: it is given by position and by name")
        return {**dict(zip(self.given, args, strict=False)), **kwargs}


def _by_argument(bound: inspect.BoundArguments) -> dict[str, Value]:
    """The arguments of a call, those that go into its **kwargs beside the others."""
    values = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD and values.keys().isdisjoint(values.get(name, ())):
            values |= values.pop(name, {})
    return values


def _leaves(name: str, captured: Nest, value: object) -> dict[str, Value]:
    leaves, recipe = model_values.flatten(value, name)
    paths = leaf_names(recipe, name)
    if paths != leaf_names(captured, name):
        raise CaptureError(
            f"argument {name!r} was captured with the tensors {leaf_names(captured, name)}, and is called with {paths}; a "
            "captured model takes the same structure that it was captured with"
        )
    for (path, old), (_, new) in zip(named(captured, name), named(recipe, name), strict=True):
        if old.kind is Kind.CONSTANT and not same(old.data, new.data):
            raise CaptureError(
                f"{path} was {old.data!r} when the model was captured, and is {new.data!r} now; capture again"
            )
    return dict(zip(paths, leaves, strict=True))


def same(old: object, new: object) -> bool:
    """Whether two arguments that are not tensors count as the same: if they cannot be compared, they do."""
    return old is new or (type(old) is type(new) and (old == new) is not False)


def batch_dims(leaves: Sequence[torch.Tensor]) -> tuple[Dims, str]:
    """The first dimension of every tensor that has the size of the batch there; or why that cannot be kept open."""
    batch = next((leaf.shape[0] for leaf in leaves if leaf.ndim), 0)
    open_ = [batch > 1 and leaf.ndim > 0 and leaf.shape[0] == batch for leaf in leaves]
    why = "the example has a batch of 1; capture with an example of at least 2 to keep the batch size open"
    return tuple({0: Dim.AUTO} if one else None for one in open_), why if batch == 1 else ""


def given_dims(table: InputTable, leaves: Sequence[torch.Tensor], spec: Mapping[str, object]) -> Dims:
    """What the user said, leaf by leaf: by argument, or by the name of a leaf."""
    found: dict[str, object] = dict.fromkeys(table.names)
    example = dict(zip(table.names, leaves, strict=True))
    known = {**dict.fromkeys(table.names, LEAF), **table.recipes}
    for name, parameter in table.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD and name not in known:  # as torch.export names them
            spec = {key: value for key, value in spec.items() if key != name} | dict(spec.get(name) or {})  # type: ignore[call-overload]
    for name, value in spec.items():
        if name not in known:
            raise CaptureError(f"dynamic_shapes names {name!r}; the arguments are {', '.join(table.names)}")
        parts = zip(leaf_names(known[name], name), _parts(known[name], value), strict=True)
        found |= {leaf: _normal(part, example[leaf], leaf) for leaf, part in parts}
    return tuple(found.values())


def _parts(nest: Nest, spec: Value) -> Iterator[object]:
    """What a nest of specs says of each leaf of a nest of the same shape."""
    if nest.kind is Kind.LEAF:
        yield spec
        return
    count = len(nest.children)
    parts = [None] * count if spec is None else list(spec.values() if isinstance(spec, Mapping) else spec)
    if len(parts) != count and count:
        raise CaptureError(f"dynamic_shapes has {len(parts)} entries for a container of {count}")
    for child, part in zip(nest.children, parts, strict=False):
        yield from _parts(child, part)


def _normal(spec: Value, leaf: torch.Tensor, name: str) -> dict[int, object] | None:
    entries = dict(spec) if isinstance(spec, Mapping) else dict(enumerate(spec or ()))
    for dim in entries:
        if not 0 <= dim < leaf.ndim:
            raise CaptureError(
                f"dynamic_shapes[{name!r}] names dimension {dim}; the example has {leaf.ndim} dimensions"
            )
    return {dim: what for dim, what in entries.items() if what is not None} or None
