"""What can be called in torch's package can be called here in the same way: by position, by name, with what it needs only."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed.pipelining as theirs

MODULES = [module.name for module in pkgutil.iter_modules(theirs.__path__)]
MACHINERY = {"_new_member_", "_value_repr_", "_make", "_replace"}  # of enumerations and of named tuples
MADE_BY_FUNCTIONS = {"Pipe", "PipeInfo", "_PipelineSchedule"}  # and not by programs


def callables(module: str) -> Iterator[tuple[str, Any, Any]]:
    """By name, what torch's module and penstock's have: functions, classes, and methods that are not special."""
    torchs, ours = (importlib.import_module(f"{package}.{module}") for package in (theirs.__name__, "penstock.compat"))
    for name, value in vars(torchs).items():
        if getattr(value, "__module__", "") != torchs.__name__ or not isinstance(value, (type, types.FunctionType)):
            continue
        found = getattr(ours, name)
        if not isinstance(value, type) or not (issubclass(value, Exception) or name in MADE_BY_FUNCTIONS):
            yield name, value, found
        for method in vars(value) if isinstance(value, type) else ():
            function, own = getattr(value, method), getattr(found, method, None)
            if (
                inspect.isroutine(function)
                and callable(own)
                and not method.startswith("__")
                and method not in MACHINERY
            ):
                yield f"{name}.{method}", function, own


def calls(signature: inspect.Signature) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Every parameter by position, as far as that goes; every one by name; and only those that must be given."""
    named = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    by_name = {p.name: p.name for p in named if p.kind is p.KEYWORD_ONLY}
    by_place = [p.name for p in named if p.kind is not p.KEYWORD_ONLY]
    yield by_place, by_name
    yield [], {name: name for name in (*by_place, *by_name)}
    yield [], {p.name: p.name for p in named if p.default is p.empty}


def differences(wanted: inspect.Signature, offered: inspect.Signature) -> list[str]:
    found = []
    for args, kwargs in calls(wanted):
        try:
            bound = offered.bind(*args, **kwargs).arguments
        except TypeError as error:
            found.append(f"{args}, {kwargs}: {error}")
            continue
        found += [
            f"{given} taken for {name}" for name, given in bound.items() if isinstance(given, str) and given != name
        ]
    for name, parameter in wanted.parameters.items():
        own = offered.parameters.get(name)
        if own is None or parameter.default is parameter.empty or own.kind in (own.VAR_POSITIONAL, own.VAR_KEYWORD):
            continue
        if repr(own.default) != repr(parameter.default) and "factory" not in repr(parameter.default):
            found.append(f"{name}={own.default!r} instead of {parameter.default!r}")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_everything_is_called_as_torchs_is(module: str) -> None:
    wrong, count = {}, 0
    for name, torchs, ours in callables(module):
        count += 1
        if texts := differences(inspect.signature(torchs), inspect.signature(ours)):
            wrong[name] = texts
    assert count
    assert wrong == {}
