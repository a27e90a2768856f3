"""Which argument was of a wrong kind: said by the function that was called, not by the line where it failed.

    @takes(PlanError)
    def check(plan: Plan) -> None: ...

    check("1f1b.csv")      # PlanError: check(plan='1f1b.csv'); expected Plan

Nothing is looked at before something has failed, so that a call costs nothing more, and what works in spite of its kind works.
"""

from __future__ import annotations

import inspect
import reprlib
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from typing import Any, Literal, TypeVar, Union, cast

from penstock.errors import PenstockError, PlanError

_Taken = TypeVar("_Taken", bound=Callable[..., object])
_Row = TypeVar("_Row")
_RAW = (TypeError, AttributeError, LookupError, ValueError, ArithmeticError, RuntimeError)


def takes(error: type[PenstockError]) -> Callable[[_Taken], _Taken]:
    """Raise that error in place of one of Python's, if an argument is not what the annotations of a function say.

    Of a class those of its `__init__` and of its class methods, which make one in other ways.
    """

    def decorate(taken: _Taken) -> _Taken:
        if isinstance(taken, type):
            makers = {name: made.__func__ for name, made in vars(taken).items() if isinstance(made, classmethod)}
            for name, maker in makers.items():
                setattr(taken, name, classmethod(_watched(maker, error)))
            setattr(taken, "__init__", _watched(getattr(taken, "__init__"), error))  # noqa: B009, B010  of that class itself
            return taken
        return cast("_Taken", _watched(taken, error))

    return decorate


def entry(rows: Sequence[_Row], at: int, asked: str) -> _Row:
    """What stands at a number from 0 up; `asked` is the call as far as its argument, for the error.

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


def _watched(function: Callable[..., object], error: type[PenstockError]) -> Callable[..., object]:
    @wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        try:
            return function(*args, **kwargs)
        except PenstockError:
            raise
        except _RAW as raised:
            wrong = _wrong(function, args, kwargs)
            if wrong is None:
                raise
            raise error(wrong) from raised

    return call


def _wrong(function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> str | None:
    """What is to be said of the first argument that is of a wrong kind."""
    signature = inspect.signature(function)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:  # Python itself says what is missing
        return None
    for name, value in given.items():
        expected = signature.parameters[name]
        if expected.kind in (expected.VAR_POSITIONAL, expected.VAR_KEYWORD) or value is expected.default:
            continue
        if not fits(value, _hint(function, expected.annotation)):
            spelled = expected.annotation if isinstance(expected.annotation, str) else expected.annotation.__name__
            named = function.__qualname__.removesuffix(".__init__")
            return f"{named}({name}={reprlib.repr(value)}); expected {spelled}"
    return None


def _hint(function: Callable[..., object], annotation: object) -> Any:
    if annotation is inspect.Parameter.empty:
        return Any
    try:
        names = inspect.unwrap(function).__globals__
        return typing.get_type_hints(types.SimpleNamespace(__annotations__={"it": annotation}), names)["it"]
    except NameError:  # imported for type checkers alone
        return Any


def fits(value: object, hint: object) -> bool:
    """Whether a value is what an annotation says, as far as it says it simply; else yes.

    >>> fits([1, "2"], list[int]), fits(None, int | None), fits(3, float)
    (False, True, True)
    """
    kind, inner = typing.get_origin(hint), typing.get_args(hint)
    if kind in (Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if kind is Literal:
        return any(value is one or value == one for one in inner if type(one) is type(value))
    if hint is float:
        return isinstance(value, int | float)
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
