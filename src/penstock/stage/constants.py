"""Constants and classes as plain, hashable data, for the specs of stage values."""

from __future__ import annotations

import importlib
from enum import Enum
from typing import Any

import torch

from penstock.dtypes import dtype_name, dtype_named
from penstock.errors import StageError


def encode_constant(value: Any, path: str) -> tuple[str, Any]:
    """The constant with the name of its type: equality then tells 1, 1.0 and True apart, and 0.0 from -0.0."""
    match value:
        case None | bool() | str() | bytes() | int() if type(value) in (type(None), bool, str, bytes, int):
            return type(value).__name__, value
        case float() | complex() if type(value) in (float, complex):
            return type(value).__name__, repr(value)
        case torch.dtype():
            return "dtype", dtype_name(value)
        case torch.device():
            return "device", str(value)
        case slice():
            return "slice", tuple(encode_constant(part, path) for part in (value.start, value.stop, value.step))
        case Enum():
            return "enum", (name_of_class(type(value), path), value.name)
    if value is Ellipsis:
        return "ellipsis", None
    raise StageError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot cross between stages. "
        "Tensors, None, numbers, strings, bytes, enums, tuples, lists, dicts, dataclasses and named tuples can; "
        "register other classes with torch.utils._pytree.register_pytree_node, or leave the value out"
    )


def decode_constant(constant: Any) -> Any:
    match constant:
        case ("float", str(text)):
            return float(text)
        case ("complex", str(text)):
            return complex(text)
        case ("dtype", str(name)):
            return dtype_named(name)
        case ("device", str(name)):
            return torch.device(name)
        case ("slice", (start, stop, step)):
            return slice(decode_constant(start), decode_constant(stop), decode_constant(step))
        case ("enum", (str(name), str(member))):
            return find(name)[member]
        case ("ellipsis", None):
            return Ellipsis
        case (_, value):
            return value
    raise StageError(f"this is no constant of a stage value: {constant!r:.200}")


def name_of_class(kind: type, path: str) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if "<locals>" in name:
        raise StageError(
            f"{path} is a {kind.__qualname__}, a class defined inside a function, which the next stage cannot import; "
            "define it at the top of its module"
        )
    return name


def find(name: str) -> Any:
    module, _, qualname = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in qualname.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise StageError(f"a value from another stage is a {name}, which cannot be imported here: {error}") from error
    return found
