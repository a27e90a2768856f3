"""Checks of the arguments of public functions.

    def check(plan: Plan) -> None:
        check_types("check", PlanError, plan=(plan, Plan))

    check("1f1b.csv")      # PlanError: check(plan='1f1b.csv'); expected Plan

A public function checks its arguments once, at its top. Functions on the path of a step, and those that searches call many times,
check them only after an error: ``except Exception: check_types(...); raise``. Functions that only penstock calls check nothing.
"""

from __future__ import annotations

import re
import reprlib
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, Union

from penstock.errors import PenstockError, PlanError

_Row = TypeVar("_Row")


def check_types(call: str, error: type[PenstockError], /, **arguments: tuple[object, object]) -> None:
    """Raise `error` for the first of the arguments of a call, each a value and its expected type, that has another type."""
    for name, (value, expected) in arguments.items():
        if not fits(value, expected):
            spelled = expected.__name__ if type(expected) is type else re.sub(r"\b([a-z_]\w*\.)+", "", str(expected))
            raise error(f"{call}({name}={reprlib.repr(value)}); expected {spelled}")


def entry(rows: Sequence[_Row], at: int, asked: str) -> _Row:
    """Return the entry at an index from 0 up; `asked` is the call up to the name of its argument, for the error.

    >>> entry(("a", "b"), 2, "rank_of(stage")
    Traceback (most recent call last):
    penstock.errors.PlanError: rank_of(stage=2); expected a stage from 0 to 1
    """
    try:
        if at >= 0:
            return rows[at]
    except (IndexError, TypeError, RuntimeError):  # the last of a tensor, which is no number
        pass
    raise PlanError(f"{asked}={at!r:.40}); expected a {asked.rpartition('(')[2]} from 0 to {len(rows) - 1}")


def fits(value: object, hint: object) -> bool:
    """Return whether a value has the type that an annotation names; True where the annotation cannot be checked.

    >>> fits([1, "2"], list[int]), fits(None, int | None), fits(3, float)
    (False, True, True)
    """
    kind, inner = typing.get_origin(hint), typing.get_args(hint)
    if kind in (Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if kind is Literal:
        return any(value is one or value == one for one in inner if type(one) is type(value))
    if hint is float or hint is int:
        return isinstance(value, Real if hint is float else Integral)
    plain: Any = type(None) if hint is None else kind or hint
    if not isinstance(plain, type) or plain is Any:
        return True
    try:
        if not isinstance(value, plain):
            return False
    except TypeError:  # a protocol that cannot be asked
        return True
    if isinstance(value, Mapping) and len(inner) == 2:
        return all(fits(key, inner[0]) and fits(one, inner[1]) for key, one in value.items())
    if isinstance(value, tuple) and kind is tuple and Ellipsis not in inner:
        return len(value) == len(inner) and all(fits(one, own) for one, own in zip(value, inner, strict=True))
    if isinstance(value, Collection) and inner and kind is not type:
        try:
            return all(fits(one, inner[0]) for one in value)
        except TypeError:  # a tensor without dimensions has the methods of a collection, and is none
            return False
    return True
