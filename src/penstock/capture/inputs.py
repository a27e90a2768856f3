"""The arguments of the model: bound by name, flattened, checked against what was captured.

    table = InputTable.of(model.forward, (x,), {"mask": m})
    table.bind((x2,), {"mask": m2})        # [x2, m2]; the same however they are passed

A leaf is called as a user would write it: ``x``, ``batch.ids``, ``states[0]``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.capture.tree import constants, leaf_paths, put_together, take_apart
from penstock.errors import CaptureError


@dataclass(frozen=True)
class Parameter:
    """One parameter of the signature, as far as the capture used it."""

    name: str
    kind: str  # "by position", "by either", "by name", "rest" (*args) or "named rest" (**kwargs)
    recipe: Any
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
            own, recipe = take_apart(value, "" if kind == "named rest" else name)
            places = tuple(range(len(leaves), len(leaves) + len(own)))
            parameters.append(Parameter(name, kind, recipe, places))
            names += leaf_paths(recipe)
            leaves += own
        order = tuple((p.name, _KINDS[p.kind]) for p in signature.parameters.values())
        return InputTable(tuple(parameters), tuple(names), order), leaves

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
            value = put_together(given[name].recipe, [leaves[i] for i in given[name].leaves])
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

    def _by_parameter(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        rest = list(args)
        named = dict(kwargs)
        for name, kind in self.order:
            if kind in ("by position", "by either") and rest:
                values[name] = rest.pop(0)
                if name in named:
                    raise CaptureError(f"argument {name!r} is given twice, by position and by name")
            elif kind in ("by either", "by name") and name in named:
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

    def _leaves(self, parameter: Parameter, value: Any) -> dict[str, Any]:
        leaves, recipe = take_apart(value, "" if parameter.kind == "named rest" else parameter.name)
        names = [self.names[i] for i in parameter.leaves]
        paths = leaf_paths(recipe)
        if paths != names:
            raise CaptureError(
                f"argument {parameter.name!r} was captured with the tensors {names}, and is called with {paths}; "
                "a captured model takes the same structure that it was captured with"
            )
        for (path, old), (_, new) in zip(
            constants(parameter.recipe, parameter.name), constants(recipe, parameter.name), strict=True
        ):
            if not same(old, new):
                raise CaptureError(f"{path} was {old!r} when the model was captured, and is {new!r} now; capture again")
        return dict(zip(names, leaves, strict=True))


def same(old: Any, new: Any) -> bool:
    """Whether two arguments that are not tensors count as the same."""
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    result = old == new
    return bool(result) if isinstance(result, bool) else True
