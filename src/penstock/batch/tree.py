"""Look one level into a value, put it together again with other children, and say where a leaf stands.

Containers are: tuple, list, dict and their kin, any mapping, NamedTuples, dataclasses, and whatever is registered with
`torch.utils._pytree`. The user's objects are never changed: a rebuilt container is a new object.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from penstock.batch.masks import is_block_mask
from penstock.batch.specs import Microbatches, is_leaf_spec
from penstock.errors import SplitError

_PLAIN = (torch.Tensor, str, bytes, bool, int, float, complex, type(None), Microbatches)


class Node(NamedTuple):
    """One container: its children, by which keys, and how to make another one."""

    keys: Sequence[Any]  # an index, a key of a mapping, or the name of a field
    children: Sequence[Any]
    build: Callable[[Sequence[Any]], Any]
    reads: str  # how a key reads in a path: "[{!r}]" or ".{}"
    ordered: bool  # a spec for it is written as a tuple, otherwise as a dict
    builtin: bool  # cheap to rebuild; others are shared by all microbatches when nothing in them is a tensor


class Path(NamedTuple):
    """Where a leaf stands; made into text only when an error needs it."""

    root: Root
    parent: Path | None = None
    node: Node | None = None
    position: int = 0

    def child(self, node: Node, index: int) -> Path:
        return Path(self.root, self, node, index)

    def __str__(self) -> str:
        if self.parent is None or self.node is None:
            return self.root.name
        return f"{self.parent}{self.node.reads.format(self.node.keys[self.position])}"

    def write(self, spec: str) -> str:
        """The argument to write so that this leaf, and no other, gets the spec."""
        path = self
        while path.parent is not None and path.node is not None:
            if path.node.ordered:
                entries = ["None"] * len(path.node.keys)
                entries[path.position] = spec
                spec = "(" + ", ".join(entries) + ("," if len(entries) == 1 else "") + ")"
            else:
                spec = f"{{{path.node.keys[path.position]!r}: {spec}}}"
            path = path.parent
        return f"{self.root.spec_name}={spec}"


class Root(NamedTuple):
    """What a path begins with, and the parameter that takes the specs for it."""

    name: str
    spec_name: str


ARGS = Path(Root("args", "args_chunk_spec"))
KWARGS = Path(Root("kwargs", "kwargs_chunk_spec"))
TARGET = Path(Root("target", "target_chunk_spec"))
OUTPUT = Path(Root("output", "output_merge_spec"))


def open_node(value: Any) -> Node | None:
    """The container's children, or None for a leaf."""
    kind = type(value)
    if issubclass(kind, _PLAIN) or is_block_mask(value):
        return None
    if kind is tuple or kind is list:
        return Node(range(len(value)), value, kind, "[{!r}]", True, True)
    if kind is dict:
        keys = list(value)
        return Node(
            keys, list(value.values()), lambda items: dict(zip(keys, items, strict=True)), "[{!r}]", False, True
        )
    if issubclass(kind, tuple) and hasattr(value, "_fields"):
        return Node(value._fields, value, value._make, ".{}", False, False)
    if kind in pytree.SUPPORTED_NODES:
        return _registered(value)
    if isinstance(value, Mapping):
        return _mapping(value)
    if issubclass(kind, list):
        return Node(range(len(value)), list(value), lambda items: _with_items(value, items), "[{!r}]", True, False)
    if issubclass(kind, tuple):
        return Node(range(len(value)), value, kind, "[{!r}]", True, False)
    if dataclasses.is_dataclass(value):
        return _fields(value)
    return None


def open_object(value: Any) -> Node | None:
    """The same for an object that nobody registered and that keeps tensors in its attributes, as caches of attention do."""
    if isinstance(value, _PLAIN) or is_block_mask(value) or not has_tensor(value):
        return None
    names = list(vars(value)) if hasattr(value, "__dict__") else []
    return _attributes(value, names) if names else None


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """The same value with another tensor in place of each."""
    if isinstance(value, torch.Tensor):
        return function(value)
    node = open_node(value) or open_object(value)
    return value if node is None else node.build([map_tensors(function, child) for child in node.children])


def has_tensor(value: Any, depth: int = 4) -> bool:
    """Whether a tensor hides in attributes or items: a cache of attention keys keeps its layers in a list."""
    if isinstance(value, torch.Tensor):
        return True
    if depth == 0 or isinstance(value, torch.nn.Module | str) or callable(value):
        return False
    if isinstance(value, Mapping):
        items: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple):
        items = value
    else:
        items = getattr(value, "__dict__", {}).values()
    return any(has_tensor(item, depth - 1) for item in items)


def child_specs(spec: Any, node: Node, path: Path) -> Sequence[Any]:
    """The spec of each child: the tree of specs is followed, a single spec (or None) holds for all."""
    if spec is None or is_leaf_spec(spec):
        return [spec] * len(node.keys)
    if isinstance(spec, Mapping):
        unknown = [key for key in spec if key not in node.keys]
        if unknown:
            raise SplitError(
                f"{path.root.spec_name} has entries for {unknown}, but {path} has only {list(node.keys)}; "
                "leave out what is not there"
            )
        return [spec.get(key) for key in node.keys]
    inside = open_node(spec)
    if inside is not None and len(inside.keys) == len(node.keys):
        if isinstance(spec, tuple | list) or list(inside.keys) == list(node.keys):
            return inside.children
    raise SplitError(
        f"the spec for {path} is {spec!r}; expected one entry for each of {list(node.keys)}, "
        "or a single TensorChunkSpec(dim), Replicate() or None for all of it"
    )


def _registered(value: Any) -> Node:
    children, spec = pytree.tree_flatten(value, is_leaf=lambda item: item is not value)
    keys: Sequence[Any] = range(len(children))
    reads, ordered = "[{!r}]", True
    named = pytree.SUPPORTED_NODES[type(value)].flatten_with_keys_fn
    entries: list[Any] = [entry for entry, _ in named(value)[0]] if named is not None else []
    if entries and all(isinstance(entry, pytree.GetAttrKey) for entry in entries):
        keys, reads, ordered = [entry.name for entry in entries], ".{}", False
    elif entries and all(isinstance(entry, pytree.MappingKey) for entry in entries):
        keys, ordered = [entry.key for entry in entries], False
    return Node(keys, children, lambda items: pytree.tree_unflatten(items, spec), reads, ordered, False)


def _mapping(value: Mapping[Any, Any]) -> Node:
    keys = list(value)

    def build(items: Sequence[Any]) -> Any:
        pairs = zip(keys, items, strict=True)
        if not isinstance(value, MutableMapping):
            return dict(pairs)
        made = copy.copy(value)
        for key, item in pairs:
            made[key] = item
        return made

    return Node(keys, [value[key] for key in keys], build, "[{!r}]", False, False)


def _with_items(value: list[Any], items: Sequence[Any]) -> list[Any]:
    made = copy.copy(value)
    made[:] = items
    return made


def _fields(value: Any) -> Node:
    """A dataclass: copied, then its fields set, so that neither __init__ nor __post_init__ runs again."""
    return _attributes(value, [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)])


def _attributes(value: Any, names: list[str]) -> Node:
    def build(items: Sequence[Any]) -> Any:
        made = copy.copy(value)
        for name, item in zip(names, items, strict=True):
            object.__setattr__(made, name, item)
        return made

    return Node(names, [getattr(value, name) for name in names], build, ".{}", False, False)
