"""What crosses from stage to stage: any nest of tensors and constants, taken apart into tensors and a `Spec`.

>>> leaves, spec = flatten({"hidden": torch.ones(2), "past": None, "sizes": (2, 3)})
>>> leaves
[tensor([1., 1.])]
>>> unflatten(spec, [torch.zeros(2)])
{'hidden': tensor([0., 0.]), 'past': None, 'sizes': (2, 3)}
>>> Spec.from_json(spec.to_json()) == spec
True

Constants stay in the spec. A spec is plain data: it can be compared, hashed, and sent as JSON; nothing is pickled.
Classes (dataclasses, named tuples, nodes registered with torch's pytree such as Hugging Face's outputs) travel as
"module:qualname", and the receiver imports them and checks that they are of the kind that they are said to be.
"""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import StageError
from penstock.stage.constants import decode_constant, encode_constant, find, name_of_class


class Kind(Enum):
    """How a node of the nest is put together."""

    TENSOR = "tensor"
    CONSTANT = "constant"  # None, bool, int, float, complex, str, bytes, torch.dtype, torch.device, slice, Ellipsis
    TUPLE = "tuple"
    LIST = "list"
    DICT = "dict"
    ORDERED = "ordered"  # OrderedDict
    NAMED = "named"  # a named tuple
    DATACLASS = "dataclass"
    REGISTERED = "registered"  # torch.utils._pytree.register_pytree_node


@dataclass(frozen=True, slots=True)
class Spec:
    """The shape of a value without its tensors.

    `data` is the constant (with its type, so that 1, 1.0 and True differ), or the keys, or the class and its fields;
    always hashable. `children` are the specs of the parts.
    """

    kind: Kind
    data: Any = None
    children: tuple[Spec, ...] = ()

    @property
    def num_tensors(self) -> int:
        return 1 if self.kind is Kind.TENSOR else sum(child.num_tensors for child in self.children)

    def to_json(self) -> Any:
        """Lists, strings and numbers only; `json.dumps` takes it."""
        if self.kind is Kind.TENSOR:
            return "tensor"
        return [self.kind.value, _encode(self.data), [child.to_json() for child in self.children]]

    @staticmethod
    def from_json(value: Any) -> Spec:
        """The inverse. Classes are imported and checked here."""
        if value == "tensor":
            return SINGLE
        match value:
            case [str(kind), data, [*children]] if kind in _KINDS:
                spec = Spec(_KINDS[kind], _decode(data), tuple(Spec.from_json(child) for child in children))
                if spec.kind in _WITH_CLASS:
                    _class_of(spec)
                return spec
            case _:
                raise StageError(f"this is no description of a stage value: {value!r:.200}")


_KINDS = {kind.value: kind for kind in Kind}
_WITH_CLASS = (Kind.NAMED, Kind.DATACLASS, Kind.REGISTERED)
SINGLE = Spec(Kind.TENSOR)
"""The spec of a lone tensor."""


def flatten(value: Any) -> tuple[list[Tensor], Spec]:
    """The tensors of a value, in order, and the rest of it."""
    if isinstance(value, Tensor):
        return [value], SINGLE
    leaves: list[Tensor] = []
    return leaves, _flatten(value, leaves, "value")


def unflatten(spec: Spec, tensors: Sequence[Tensor]) -> Any:
    """The value again, with other tensors. Their number must be that of the spec."""
    if spec is SINGLE and len(tensors) == 1:
        return tensors[0]
    if len(tensors) != spec.num_tensors:
        raise StageError(f"a value with {spec.num_tensors} tensors cannot be made of {len(tensors)}")
    return _unflatten(spec, iter(tensors))


def detach_leaf(tensor: Tensor, requires_grad: bool) -> Tensor:
    """A fresh leaf with the same storage; the given tensor is left alone.

    >>> detach_leaf(torch.ones(1), True).is_leaf
    True
    """
    leaf = tensor.detach()
    return leaf.requires_grad_() if requires_grad else leaf


def _flatten(value: Any, leaves: list[Tensor], path: str) -> Spec:
    if isinstance(value, Tensor):
        leaves.append(value)
        return SINGLE
    kind = type(value)
    if kind is tuple or kind is list or kind is torch.Size:
        return Spec(
            Kind.LIST if kind is list else Kind.TUPLE,
            None,
            tuple(_flatten(item, leaves, f"{path}[{index}]") for index, item in enumerate(value)),
        )
    if kind is dict or kind is OrderedDict:
        keys = tuple(encode_constant(key, f"the key {key!r} of {path}") for key in value)
        parts = tuple(_flatten(item, leaves, f"{path}[{key!r}]") for key, item in value.items())
        return Spec(Kind.DICT if kind is dict else Kind.ORDERED, keys, parts)
    if kind in pytree.SUPPORTED_NODES and kind not in _BUILT_IN_NODES:
        return _flatten_registered(value, leaves, path)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        fields = kind._fields
        parts = tuple(_flatten(item, leaves, f"{path}.{name}") for name, item in zip(fields, value, strict=True))
        return Spec(Kind.NAMED, (name_of_class(kind, path), fields), parts)
    if dataclasses.is_dataclass(value):
        fields = tuple(field.name for field in dataclasses.fields(value))
        parts = tuple(_flatten(getattr(value, name), leaves, f"{path}.{name}") for name in fields)
        return Spec(Kind.DATACLASS, (name_of_class(kind, path), fields), parts)
    return Spec(Kind.CONSTANT, encode_constant(value, path))


_BUILT_IN_NODES = frozenset(pytree.BUILTIN_TYPES) | {torch.Size}


def _flatten_registered(value: Any, leaves: list[Tensor], path: str) -> Spec:
    kind = type(value)
    items, context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
    parts = tuple(_flatten(item, leaves, f"{path}.{index}") for index, item in enumerate(items))
    return Spec(Kind.REGISTERED, (name_of_class(kind, path), _dump_context(kind, context, path)), parts)


def _dump_context(kind: type, context: Any, path: str) -> Any:
    """What the registered node wants back, in JSON if it registered a way to write it, or as constants."""
    serialize = pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
    if serialize is not None and callable(serialize.to_dumpable_context):
        return "dumped", json.dumps(serialize.to_dumpable_context(context))
    rest: list[Tensor] = []
    spec = _flatten(context, rest, f"the context of {path}")
    if rest:
        raise StageError(
            f"the pytree context of {path} ({kind.__qualname__}) holds tensors; they belong in its children"
        )
    return "plain", spec


def _load_context(kind: type, dumped: Any) -> Any:
    match dumped:
        case ("dumped", str(text)):
            from_text: Any = pytree.SUPPORTED_SERIALIZED_TYPES[kind].from_dumpable_context
            return from_text(json.loads(text))
        case ("plain", Spec() as spec):
            return _unflatten(spec, iter(()))
        case _:
            raise StageError(f"the pytree context of {kind.__qualname__} cannot be read: {dumped!r:.200}")


def _unflatten(spec: Spec, tensors: Iterator[Tensor]) -> Any:
    if spec.kind is Kind.TENSOR:
        return next(tensors)
    if spec.kind is Kind.CONSTANT:
        return decode_constant(spec.data)
    parts = [_unflatten(child, tensors) for child in spec.children]
    match spec.kind:
        case Kind.TUPLE:
            return tuple(parts)
        case Kind.LIST:
            return parts
        case Kind.DICT:
            return dict(zip(map(decode_constant, spec.data), parts, strict=True))
        case Kind.ORDERED:
            return OrderedDict(zip(map(decode_constant, spec.data), parts, strict=True))
        case Kind.NAMED:
            return _class_of(spec)(*parts)
        case Kind.DATACLASS:
            return _build(_class_of(spec), dict(zip(spec.data[1], parts, strict=True)))
        case Kind.REGISTERED:
            kind = _class_of(spec)
            return pytree.SUPPORTED_NODES[kind].unflatten_fn(parts, _load_context(kind, spec.data[1]))


def _build(kind: type, values: dict[str, Any]) -> Any:
    """A dataclass from its fields; those that its constructor does not take are set afterwards."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    made = kind(**{name: value for name, value in values.items() if fields[name].init})
    for name, value in values.items():
        if not fields[name].init:
            object.__setattr__(made, name, value)
    return made


def _class_of(spec: Spec) -> Any:
    """The class of a node, checked to be what the spec says: other names of a module are never called."""
    name = spec.data[0]
    known = _classes.get((spec.kind, spec.data))
    if known is not None:
        return known
    kind = find(name)
    fields: Any = None
    fits = isinstance(kind, type)
    match spec.kind if fits else None:
        case Kind.NAMED:
            fields = getattr(kind, "_fields", None)
            fits = issubclass(kind, tuple) and fields == spec.data[1]
        case Kind.DATACLASS:
            fits = dataclasses.is_dataclass(kind)
            fields = tuple(field.name for field in dataclasses.fields(kind)) if fits else None
            fits = fields == spec.data[1]
        case Kind.REGISTERED:
            fits = kind in pytree.SUPPORTED_NODES
    if not fits:
        raise StageError(
            f"a value from another stage is a {spec.kind.value} {spec.data!r:.200}, "
            f"but here {name} is {kind!r} {fields or ''}"
        )
    _classes[spec.kind, spec.data] = kind
    return kind


_classes: dict[tuple[Kind, Any], Any] = {}


def _encode(data: Any) -> Any:
    """Hashable data as JSON: tuples become {"t": [...]}, bytes {"b": hex}, specs {"s": ...}."""
    match data:
        case tuple():
            return {"t": [_encode(item) for item in data]}
        case bytes():
            return {"b": data.hex()}
        case Spec():
            return {"s": data.to_json()}
        case _:
            return data


def _decode(data: Any) -> Any:
    match data:
        case {"t": [*items]}:
            return tuple(_decode(item) for item in items)
        case {"b": str(text)}:
            return bytes.fromhex(text)
        case {"s": spec}:
            return Spec.from_json(spec)
        case None | bool() | int() | float() | str():
            return data
        case _:
            raise StageError(f"this is no part of the description of a stage value: {data!r:.200}")
