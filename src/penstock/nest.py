"""Nests: values with tensors somewhere inside. Here they are opened, walked, named and put together again.

>>> leaves, nest = Nesting().flatten({"hidden": torch.ones(2), "sizes": (2, 3)})
>>> leaves, leaf_names(nest)
([tensor([1., 1.])], ['hidden'])
>>> Nesting().unflatten(nest, ["another"])
{'hidden': 'another', 'sizes': (2, 3)}

A `Node` is one container, opened: its children, by which keys, and how to make another one like it. A `Nest` is the shape
of a whole value without its leaves. `Nesting` says what its users see differently: what is a leaf, what is a container,
and how a constant stands in the nest.

Containers are tuple, list, dict and their kin, any mapping, named tuples, dataclasses, and whatever is registered with
`torch.utils._pytree`; objects that keep tensors in their attributes, for those who ask. The user's objects are never
changed: a container is made anew.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import StageError

Value: TypeAlias = Any
"""A value of the user's own, of which nothing is known: whatever a model takes or returns, or is trained against."""

PLAIN = (Tensor, str, bytes, bool, int, float, complex, type(None))


class Kind(Enum):
    """How a part of a nest is put together. The word is also what stands for it in JSON."""

    LEAF = "tensor"
    CONSTANT = "constant"
    TUPLE = "tuple"
    LIST = "list"
    DICT = "dict"
    ORDERED = "ordered"  # OrderedDict
    NAMED = "named"  # a named tuple
    DATACLASS = "dataclass"
    REGISTERED = "registered"  # torch.utils._pytree.register_pytree_node
    OBJECT = "object"  # any other, by its attributes
    COPY = "copy"  # other mappings, and subclasses of list and tuple: made again by copying one


class By(Enum):
    """What the keys of a container are."""

    PLACE = "place"
    KEY = "key"
    NAME = "name of an attribute"


class Node(NamedTuple):
    """One container: its children, by which keys, and what it takes to make another one."""

    kind: Kind
    by: By
    keys: Sequence[Value]
    children: Sequence[Value]
    data: Value  # what `rebuilt` needs to know: the keys, the class, the class and what else it needs
    value: Value

    def written(self, place: int) -> str:
        """How a child is written behind the container."""
        return f".{self.keys[place]}" if self.by is By.NAME else f"[{self.keys[place]!r}]"

    def build(self, children: Sequence[object]) -> Value:
        """Another one like this, with other children. Neither __init__ nor __post_init__ runs again."""
        if self.kind not in _COPIED:
            return rebuilt(self.kind, self.data, children)
        if self.by is By.PLACE and isinstance(self.value, tuple):
            return type(self.value)(children)
        if self.by is By.KEY and not isinstance(self.value, MutableMapping):
            return dict(zip(self.keys, children, strict=True))
        made = copy.copy(self.value)
        if self.by is By.NAME:
            return _with(made, dict(zip(self.keys, children, strict=True)), self.keys)
        for key, child in zip(self.keys, children, strict=True):
            made[key] = child
        return made


_COPIED = (Kind.DATACLASS, Kind.OBJECT, Kind.COPY)


def open_node(value: Value) -> Node | None:
    """A container, opened by one level; None for what is none."""
    kind = type(value)
    if issubclass(kind, PLAIN):
        return None
    if kind is tuple or kind is list:
        return Node(Kind.TUPLE if kind is tuple else Kind.LIST, By.PLACE, range(len(value)), value, None, value)
    if kind is dict or kind is OrderedDict:
        keys = tuple(value)
        return Node(Kind.DICT if kind is dict else Kind.ORDERED, By.KEY, keys, list(value.values()), keys, value)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return Node(Kind.NAMED, By.NAME, kind._fields, value, (kind, kind._fields), value)
    if kind in pytree.SUPPORTED_NODES:
        return _registered(value)
    if isinstance(value, Mapping):
        keys = tuple(value)
        return Node(Kind.COPY, By.KEY, keys, [value[key] for key in keys], None, value)
    if issubclass(kind, list | tuple):
        return Node(Kind.COPY, By.PLACE, range(len(value)), list(value), None, value)
    if dataclasses.is_dataclass(value):
        names = tuple(field.name for field in dataclasses.fields(value) if hasattr(value, field.name))
        return Node(Kind.DATACLASS, By.NAME, names, [getattr(value, n) for n in names], (kind, names), value)
    return None


def open_object(value: object) -> Node | None:
    """An object that nobody registered and that keeps tensors in its attributes, as caches of attention do."""
    if isinstance(value, PLAIN) or not has_tensor(value):
        return None
    attributes = getattr(value, "__dict__", {})
    names = tuple(attributes)
    return Node(Kind.OBJECT, By.NAME, names, list(attributes.values()), (type(value), names), value) if names else None


def _registered(value: object) -> Node:
    kind = type(value)
    entry = pytree.SUPPORTED_NODES[kind]
    children, context = entry.flatten_fn(value)
    by, keys = _registered_keys(kind, context, len(children))
    if entry.flatten_with_keys_fn is not None:
        entries: list[Value] = [key for key, _ in entry.flatten_with_keys_fn(value)[0]]
        if entries and all(isinstance(key, pytree.GetAttrKey) for key in entries):
            by, keys = By.NAME, [key.name for key in entries]
        elif entries and all(isinstance(key, pytree.MappingKey) for key in entries):
            by, keys = By.KEY, [key.key for key in entries]
    return Node(Kind.REGISTERED, by, keys, children, (kind, context), value)


def _registered_keys(kind: type, context: object, count: int) -> tuple[By, Sequence[Value]]:
    """Many keep the keys as their context: Hugging Face's outputs, defaultdict (behind its factory)."""
    names = context[1] if isinstance(context, list | tuple) and len(context) == 2 else context
    for found in (names, context):
        if isinstance(found, list | tuple) and len(found) == count and all(isinstance(n, str | int) for n in found):
            return By.KEY if issubclass(kind, Mapping) else By.NAME, found
    return By.PLACE, range(count)


def rebuilt(kind: Kind, data: Value, children: Sequence[Value]) -> object:
    """A container out of its description and children."""
    match kind:
        case Kind.TUPLE:
            return tuple(children)
        case Kind.LIST:
            return list(children)
        case Kind.DICT:
            return dict(zip(data, children, strict=True))
        case Kind.ORDERED:
            return OrderedDict(zip(data, children, strict=True))
        case Kind.NAMED:
            return tuple.__new__(data[0], children)
        case Kind.REGISTERED:
            return pytree.SUPPORTED_NODES[data[0]].unflatten_fn(list(children), data[1])
        case Kind.DATACLASS:
            taken = {field.name for field in dataclasses.fields(data[0]) if field.init}
            values = dict(zip(data[1], children, strict=True))
            return _with(data[0](**{n: v for n, v in values.items() if n in taken}), values, values.keys() - taken)
        case Kind.OBJECT:
            return _with(object.__new__(data[0]), dict(zip(data[1], children, strict=True)), data[1])
    raise TypeError(f"a {kind.value} cannot be made out of its description")


def _with(made: object, values: Mapping[str, object], names: Iterable[str]) -> object:
    for name in names:
        object.__setattr__(made, name, values[name])
    return made


@dataclass(frozen=True, slots=True)
class Nest:
    """The shape of a value without its leaves: plain data, which can be compared, printed and saved."""

    kind: Kind
    data: Value = None  # the constant, or what `rebuilt` needs
    children: tuple[Value, ...] = ()

    @property
    def num_leaves(self) -> int:
        return 1 if self.kind is Kind.LEAF else sum(child.num_leaves for child in self.children)


LEAF = Nest(Kind.LEAF)


Trail = tuple[Any, Any, int]  # where one is: the trail so far, then the container and the place in it, or (a text, 0)


def spelled(trail: Trail) -> str:
    """A trail as a user would write it: "value['a'][1].content". It is made into text only when an error needs it."""
    before, node, place = trail
    text = "" if before is None else spelled(before)
    if isinstance(node, str):  # stands before all the rest
        return node + text
    return f"{text}{node.written(place)}"


class Nesting:
    """How one kind of user reads nests. The methods can be overridden; these see tensors and what containers hold."""

    leaf: Any = LEAF
    leaf_types: tuple[type, ...] = (Tensor,)

    def opened(self, value: object) -> Node | None:
        return open_node(value)

    def constant(self, value: object, trail: Trail) -> object:
        """The nest of a value that is neither a leaf nor a container."""
        return Nest(Kind.CONSTANT, value)

    def container(self, node: Node, children: tuple[object, ...], trail: Trail) -> object:
        """The nest of a container."""
        return Nest(node.kind, node.data, children)

    def data(self, nest: Any) -> Value:
        """The constant, or what `rebuilt` needs."""
        return nest.data

    def flatten(self, value: object, name: str = "value") -> tuple[list[Value], Value]:
        """The leaves, in order, and the nest."""
        leaves: list[Value] = []
        try:
            return leaves, self.walk(value, leaves, (None, name, 0))
        except RecursionError:
            raise StageError(f"{name} contains itself, or more levels than can be taken apart") from None

    def walk(self, value: Value, leaves: list[Value], trail: Trail) -> object:
        if isinstance(value, self.leaf_types):
            leaves.append(value)
            return self.leaf
        node = self.opened(value)
        if node is None:
            return self.constant(value, trail)
        parts = [self.walk(child, leaves, (trail, node, place)) for place, child in enumerate(node.children)]
        return self.container(node, tuple(parts), trail)

    def unflatten(self, nest: object, leaves: Iterable[object]) -> Value:
        """The value again, with other leaves."""
        return self._build(nest, iter(leaves))

    def _build(self, nest: Any, leaves: Iterator[Value]) -> object:
        if nest.kind is Kind.LEAF:
            return next(leaves)
        data = self.data(nest)
        if nest.kind is Kind.CONSTANT:
            return data
        return rebuilt(nest.kind, data, [self._build(child, leaves) for child in nest.children])


def named(nest: Nest, name: str = "") -> Iterator[tuple[str, Nest]]:
    """Every leaf and constant of a nest with its name, as a user would write it: "batch.ids", "states[0]"."""
    match nest.kind:
        case Kind.LEAF | Kind.CONSTANT:
            yield name.removeprefix("."), nest
            return
        case Kind.DICT | Kind.ORDERED:
            keys = nest.data
        case Kind.NAMED | Kind.DATACLASS | Kind.OBJECT:
            keys = nest.data[1]
        case Kind.REGISTERED:
            keys = _registered_keys(nest.data[0], nest.data[1], len(nest.children))[1]
        case _:
            keys = range(len(nest.children))
    for key, child in zip(keys, nest.children, strict=True):
        yield from named(child, name + (f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"))


def leaf_names(nest: Nest, name: str = "") -> list[str]:
    """The names of the leaves, in order."""
    return [text for text, part in named(nest, name) if part.kind is Kind.LEAF]


def map_tensors(function: Callable[[Tensor], Value], value: object) -> Value:
    """The same value with another tensor in place of each."""
    if isinstance(value, Tensor):
        return function(value)
    node = open_node(value) or open_object(value)
    return value if node is None else node.build([map_tensors(function, child) for child in node.children])


def tensors_in(value: object) -> list[Tensor]:
    """The tensors of a value, in the order in which they stand in it.

    >>> [tensor.item() for tensor in tensors_in({"a": torch.tensor(1), "b": (2, [torch.tensor(3)])})]
    [1, 3]
    """
    if isinstance(value, Tensor):
        return [value]
    node = open_node(value) or open_object(value)
    return [] if node is None else [tensor for child in node.children for tensor in tensors_in(child)]


def has_tensor(value: object, depth: int = 6, seen: set[int] | None = None) -> bool:
    """Whether a tensor hides in attributes or items: a cache of attention keys keeps its layers in a list."""
    if isinstance(value, Tensor):
        return True
    seen = set() if seen is None else seen
    if depth == 0 or id(value) in seen or isinstance(value, torch.nn.Module | str) or callable(value):
        return False
    seen.add(id(value))
    if isinstance(value, Mapping):
        items: Iterable[Value] = value.values()
    elif isinstance(value, list | tuple):
        items = value
    else:
        items = getattr(value, "__dict__", {}).values()
    return any(has_tensor(item, depth - 1, seen) for item in items)
