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
import pkgutil
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.dtypes import dtype_name, dtype_named
from penstock.errors import StageError
from penstock.nest import Kind, Nest, Nesting, Node, Trail, Value, open_node, spelled


class Spec(Nest):
    """The shape of a value without its tensors, fit to be sent.

    `data` is the constant (with its type, so that 1, 1.0 and True differ), or the keys, or the class and its fields;
    always hashable. `children` are the specs of the parts.
    """

    __slots__ = ()

    def to_json(self) -> object:
        """Tuples, strings and numbers only; `json.dumps` takes it, and makes lists of the tuples."""
        if self.kind is Kind.LEAF:
            return "tensor"
        return self.kind.value, self.data, tuple(child.to_json() for child in self.children)

    @staticmethod
    def from_json(value: object) -> Spec:
        """The inverse. Classes are imported and checked here."""
        if value == "tensor":
            return SINGLE
        match value:
            case [str(kind), data, [*children]] if kind in _KINDS:
                spec = Spec(_KINDS[kind], _decode(data), tuple(Spec.from_json(child) for child in children))
                if spec.kind in _WITH_CLASS:
                    _class_of(spec.kind, spec.data)
                return spec
            case _:
                raise StageError(f"this is no description of a stage value: {value!r:.200}")


_KINDS = {kind.value: kind for kind in Kind if kind not in (Kind.LEAF, Kind.OBJECT, Kind.COPY)}
_WITH_CLASS = (Kind.NAMED, Kind.DATACLASS, Kind.REGISTERED)
SINGLE = Spec(Kind.LEAF)
"""The spec of a lone tensor."""


def flatten(value: object) -> tuple[list[Tensor], Spec]:
    """The tensors of a value, in order, and the rest of it."""
    if type(value) is Tensor or isinstance(value, Tensor):
        return [value], SINGLE
    return _crossing.flatten(value)


def unflatten(spec: Spec, tensors: Sequence[Tensor]) -> Value:
    """The value again, with other tensors. Their number must be that of the spec."""
    if spec is SINGLE and len(tensors) == 1:
        return tensors[0]
    if len(tensors) != spec.num_leaves:
        raise StageError(f"a value with {spec.num_leaves} tensors cannot be made of {len(tensors)}")
    return _crossing.unflatten(spec, tensors)


class _Crossing(Nesting):
    """Sees what can be sent; anything else is an error that says where it stands."""

    leaf = SINGLE

    def opened(self, value: object) -> Node | None:
        node = open_node(tuple(value) if type(value) is torch.Size else value)
        return None if node is None or node.kind is Kind.COPY else node

    def constant(self, value: object, trail: Trail) -> Spec:
        return Spec(Kind.CONSTANT, encode_constant(value, trail))

    def container(self, node: Node, children: tuple[object, ...], trail: Trail) -> Spec:
        match node.kind:
            case Kind.TUPLE | Kind.LIST:
                data: Value = None
            case Kind.DICT | Kind.ORDERED:
                data = tuple(encode_constant(key, (trail, "a key of ", 0)) for key in node.keys)
            case Kind.REGISTERED:
                data = (name_of_class(node.data[0], trail), self._dumped(node.data[0], node.data[1], trail))
            case _:
                data = (name_of_class(node.data[0], trail), tuple(node.data[1]))
        return Spec(node.kind, data, children)

    def data(self, nest: Value) -> Value:
        match nest.kind:
            case Kind.CONSTANT:
                return decode_constant(nest.data)
            case Kind.DICT | Kind.ORDERED:
                return map(decode_constant, nest.data)
            case Kind.REGISTERED:
                kind = _class_of(nest.kind, nest.data)
                return kind, self._loaded(kind, nest.data[1])
            case Kind.NAMED | Kind.DATACLASS:
                return _class_of(nest.kind, nest.data), nest.data[1]
        return None

    def _dumped(self, kind: type, context: Value, trail: Trail) -> tuple[str, object]:
        """What the registered node wants back, in JSON if it registered a way to write it, or as constants."""
        serialize = pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
        if serialize is not None and callable(serialize.to_dumpable_context):
            return "dumped", json.dumps(serialize.to_dumpable_context(context))
        rest: list[Tensor] = []
        spec: Spec = self.walk(context, rest, (trail, "the context of ", 0))  # type: ignore[assignment]
        if rest:
            raise StageError(
                f"the pytree context of {spelled(trail)} ({kind.__qualname__}) holds tensors; they belong in its children"
            )
        return "plain", spec.to_json()

    def _loaded(self, kind: type, dumped: object) -> Value:
        match dumped:
            case ("dumped", str(text)):
                from_text: Value = pytree.SUPPORTED_SERIALIZED_TYPES[kind].from_dumpable_context
                return from_text(json.loads(text))
            case ("plain", spec):
                return self.unflatten(Spec.from_json(spec), ())
            case _:
                raise StageError(f"the pytree context of {kind.__qualname__} cannot be read: {dumped!r:.200}")


_crossing = _Crossing()


# -- constants and classes as plain, hashable data


Write = Callable[[Value], str]
_WRITE: dict[type, Write] = {float: repr, complex: repr, bytes: bytes.hex, torch.dtype: dtype_name, torch.device: str}
_READ = dict[str, Callable[[str], object]](
    float=float, complex=complex, bytes=bytes.fromhex, dtype=dtype_named, device=torch.device
)


def encode_constant(value: object, trail: Trail) -> tuple[str, object]:
    """The constant with the name of its type: equality then tells 1, 1.0 and True apart, and 0.0 from -0.0."""
    kind = type(value)
    if value is None or kind in (bool, str, int):
        return kind.__name__, value
    if kind in _WRITE:
        return kind.__name__, _WRITE[kind](value)
    match value:
        case slice():
            return "slice", tuple(encode_constant(part, trail) for part in (value.start, value.stop, value.step))
        case Enum():
            return "enum", (name_of_class(type(value), trail), value.name)
    if value is Ellipsis:
        return "ellipsis", None
    raise StageError(
        f"{spelled(trail)} is a {type(value).__module__}.{type(value).__qualname__}, which cannot cross between stages. "
        "Tensors, None, numbers, strings, bytes, enums, tuples, lists, dicts, dataclasses and named tuples can; "
        "register other classes with torch.utils._pytree.register_pytree_node, or leave the value out"
    )


def decode_constant(constant: object) -> Value:
    match constant:
        case (str(kind), str(text)) if kind in _READ:
            return _READ[kind](text)
        case ("slice", (start, stop, step)):
            return slice(decode_constant(start), decode_constant(stop), decode_constant(step))
        case ("enum", (str(name), str(member))):
            return find(name)[member]
        case ("ellipsis", None):
            return Ellipsis
        case (_, value):
            return value
    raise StageError(f"this is no constant of a stage value: {constant!r:.200}")


def name_of_class(kind: type, trail: Trail) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if "<locals>" in name:
        raise StageError(
            f"{spelled(trail)} is a {kind.__qualname__}, a class defined inside a function, which the next stage cannot import; "
            "define it at the top of its module"
        )
    return name


def find(name: str) -> Value:
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise StageError(f"a value from another stage is a {name}, which cannot be imported here: {error}") from error


@cache
def _class_of(kind: Kind, data: tuple[str, object]) -> type:
    """The class of a node, checked to be what its spec says: other names of a module are never called."""
    name, expected = data
    found: type = find(name)
    fields: object = None  # as they are here
    if isinstance(found, type):
        if kind is Kind.NAMED and issubclass(found, tuple):
            fields = getattr(found, "_fields", None)
        elif kind is Kind.DATACLASS and dataclasses.is_dataclass(found):
            fields = tuple(field.name for field in dataclasses.fields(found))
        elif kind is Kind.REGISTERED and found in pytree.SUPPORTED_NODES:
            fields = expected  # it has none
    if fields is None or fields != expected:
        raise StageError(
            f"a value from another stage is a {kind.value} {data!r:.200}, but here {name} is {found!r} {fields or ''}"
        )
    return found


def _decode(data: object) -> object:
    """Data of a spec, which JSON has made lists of."""
    match data:
        case [*items]:
            return tuple(map(_decode, items))
        case None | bool() | int() | float() | str():
            return data
        case _:
            raise StageError(f"this is no part of the description of a stage value: {data!r:.200}")
