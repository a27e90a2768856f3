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
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar, cast

from penstock.checks import fits
from penstock.errors import PenstockError

_Taken = TypeVar("_Taken", bound=Callable[..., object])
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
