"""Any Python value into a list of tensors and a recipe that puts them back.

    leaves, recipe = take_apart({"logits": t, "cache": DynamicCache(...), "n": 3})
    put_together(recipe, leaves)           # an equal value: same containers, same classes

Registered pytrees (tuples, dicts, named tuples, ``ModelOutput``) go through torch's registry. Dataclasses and other
objects that hold tensors somewhere are taken apart attribute by attribute, so that nobody has to register them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

_PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.layout, type)


@dataclass(frozen=True)
class Leaf:
    """The place of one tensor (or traced size): its position in the list, and how a user would write its path."""

    index: int
    path: str


@dataclass(frozen=True)
class Constant:
    """A value that is not a tensor and stays what it was."""

    value: Any


@dataclass(frozen=True)
class Container:
    """A registered pytree: its kind as torch's registry describes it, and its children."""

    kind: Any
    context: Any
    children: tuple[Any, ...]


@dataclass(frozen=True)
class Plain:
    """An object without registration: its class and its attributes."""

    kind: type
    names: tuple[str, ...]
    children: tuple[Any, ...]


@dataclass
class _Walk:
    leaves: list[Any] = field(default_factory=list)
    open: set[int] = field(default_factory=set)


def take_apart(value: Any, path: str = "") -> tuple[list[Any], Any]:
    """The tensors (and traced sizes) of `value`, in order, and the recipe that puts them back."""
    walk = _Walk()
    recipe = _apart(value, path, walk)
    return walk.leaves, recipe


def put_together(recipe: Any, leaves: Sequence[Any]) -> Any:
    """The inverse of ``take_apart``."""
    match recipe:
        case Leaf(index):
            return leaves[index]
        case Constant(value):
            return value
        case Container(kind, context, children):
            return pytree.SUPPORTED_NODES[kind].unflatten_fn([put_together(c, leaves) for c in children], context)
        case Plain(kind, names, children):
            made: Any = object.__new__(kind)
            for name, child in zip(names, children, strict=True):
                object.__setattr__(made, name, put_together(child, leaves))
            return made
    raise TypeError(f"{recipe!r} is no recipe")


def leaf_paths(recipe: Any) -> list[str]:
    """How a user would write each leaf, in the order of the leaves."""
    match recipe:
        case Leaf(_, path):
            return [path.removeprefix(".")]
        case Container(_, _, children) | Plain(_, _, children):
            return [path for child in children for path in leaf_paths(child)]
    return []


def constants(recipe: Any, path: str = "") -> list[tuple[str, Any]]:
    """Every constant of a recipe with its place, for comparing two of them."""
    match recipe:
        case Constant(value):
            return [(path, value)]
        case Container(kind, context, children):
            keys = _keys(kind, context, len(children))
            return [c for key, child in zip(keys, children, strict=True) for c in constants(child, path + key)]
        case Plain(_, names, children):
            return [c for n, child in zip(names, children, strict=True) for c in constants(child, f"{path}.{n}")]
    return []


def _apart(value: Any, path: str, walk: _Walk) -> Any:
    if isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
        walk.leaves.append(value)
        return Leaf(len(walk.leaves) - 1, path)
    if isinstance(value, _PLAIN):
        return Constant(value)
    if id(value) in walk.open:
        raise TypeError(f"{path or 'the value'} contains itself")
    walk.open.add(id(value))
    kind = pytree._get_node_type(value)
    if kind in pytree.SUPPORTED_NODES:
        children, context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
        keys = _keys(kind, context, len(children))
        parts = tuple(_apart(c, path + key, walk) for key, c in zip(keys, children, strict=True))
        result: Any = Container(kind, context, parts)
    else:
        result = _apart_object(value, path, walk)
    walk.open.discard(id(value))
    return result


def _apart_object(value: Any, path: str, walk: _Walk) -> Any:
    attributes = getattr(value, "__dict__", None)
    if attributes is None or callable(value) or isinstance(value, torch.nn.Module):
        return Constant(value)
    count = len(walk.leaves)
    names = tuple(attributes)
    parts = tuple(_apart(attributes[name], f"{path}.{name}" if path else name, walk) for name in names)
    if len(walk.leaves) == count:
        return Constant(value)
    return Plain(type(value), names, parts)


def _keys(kind: Any, context: Any, count: int) -> list[str]:
    """How the children of a container are reached: ".name" where that reads well, "[i]" elsewhere."""
    names: Any = None
    if isinstance(context, type) and hasattr(context, "_fields"):
        names = context._fields
    elif isinstance(context, list | tuple):
        names = context[1] if len(context) == 2 and isinstance(context[1], list) else context
    if not isinstance(names, list | tuple) or len(names) != count:
        return [f"[{i}]" for i in range(count)]
    return [f".{n}" if isinstance(n, str) and n.isidentifier() else f"[{n!r}]" for n in names]
