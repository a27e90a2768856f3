"""Torch's list of a checkpoint's contents (`.metadata`): written for programs without penstock, read without trusting it.

    data = write_list(manifest)                    # what torch.distributed.checkpoint expects to find
    entries = read_list(folder)                    # of a checkpoint that torch alone has written

The list is a pickle, and unpickling runs what a pickle says. So penstock has a reader of its own: the few instructions that
such a list is made of build inert records (`_Record`: a name, arguments, a state); nothing is imported, called or set on
an object of anybody's. What the records mean is decided afterwards, by their names.
"""

from __future__ import annotations

import pickle
import pickletools
import reprlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from penstock.checkpoint.manifest import Damaged, Entry, Manifest, Part, check_entry, read_small
from penstock.dtypes import dtype_name, dtype_named
from penstock.errors import StageError

LIST = ".metadata"  # as torch calls it
LIMIT = 1 << 30
UNKNOWN = -1  # where the values of a part begin, if penstock did not write it
_OF_LISTS = "torch.distributed.checkpoint.metadata."


def write_list(manifest: Manifest) -> bytes:
    """The manifest as torch's own classes, pickled. A tensor with several names is shown under each, and lies there once."""
    from torch import Size
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    listed: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    where, paths = {}, {}
    names = {f"model.{name}": [f"model.{other}" for other in others] for name, others in manifest.aliases.items()}
    for key, entry in manifest.tensors.items():
        chunks = [ChunkStorageMetadata(Size(part.start), Size(part.shape)) for part in entry.parts]
        properties = TensorProperties(dtype=dtype_named(entry.dtype))
        for name in (key, *names.get(key, ())):
            listed[name] = TensorStorageMetadata(properties, Size(entry.shape), chunks)
            paths[name] = _path(name)
            for number, part in enumerate(entry.parts):
                index = MetadataIndex(name, part.start, number)
                where[index] = _StorageInfo(part.file, part.offset, part.length)
    return pickle.dumps(Metadata(listed, paths, where, StorageMeta(), version="1.0.0"))


def _path(key: str) -> tuple[str, ...]:
    """Where the value stands in the state dict that a program without penstock would have saved."""
    if key.startswith("optimizer.state."):
        name, _, part = key.removeprefix("optimizer.state.").rpartition(".")
        return "optimizer", "state", name, part
    head, _, rest = key.partition(".")
    return head, rest


# -- reading


def read_list(folder: Path) -> dict[str, Entry]:
    """The tensors of a checkpoint, as its list of contents says."""
    file = folder / LIST
    try:
        data = read_small(file, LIMIT)
        return _entries(_records(data), most=len(data) // 16)  # a block takes some sixty bytes
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        RecursionError,
        OverflowError,
        StageError,
    ) as error:
        raise Damaged(f"{file}, torch's list of what the checkpoint holds, cannot be read: {error}") from error


class _Record:
    """Something that the pickle would have made."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name, self.args = name, args
        self.state: Any = None

    def __getitem__(self, field: str) -> Any:
        if not isinstance(self.state, dict):
            raise ValueError(f"a {self.name} without fields")
        return self.state[field]


class _Global(str):
    """The name of a class or function; only a name."""

    __slots__ = ()


_MARK = object()
_WORDS = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")
_CONSTANT = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _records(data: bytes) -> Any:
    """The value of a pickle whose instructions are those of a list of contents."""
    machine = _Machine()
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in ("PROTO", "FRAME"):
            continue
        if name == "STOP":
            return machine.pop()
        if name in _WORDS:
            machine.stack.append(argument)
        elif name in _CONSTANT:
            machine.stack.append(_CONSTANT[name])
        elif name in _TUPLES:
            machine.tuple_of(_TUPLES[name])
        else:
            act = machine.acts.get(name)
            if act is None:
                raise ValueError(f"it says {name}, which no list of tensors needs; it is not run")
            act(argument)
    raise ValueError("it ends too early")


class _Machine:
    """The stack and the memo of a pickle, and what the instructions do to them."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.acts: dict[str, Callable[[Any], None]] = {
            "MARK": lambda _: self.stack.append(_MARK),
            "EMPTY_LIST": lambda _: self.stack.append([]),
            "EMPTY_DICT": lambda _: self.stack.append({}),
            "TUPLE": lambda _: self.stack.append(tuple(self.to_mark())),
            "MEMOIZE": lambda _: self.remember(len(self.memo)),
            "BINPUT": self.remember,
            "LONG_BINPUT": self.remember,
            "BINGET": lambda number: self.stack.append(self.memo[number]),
            "LONG_BINGET": lambda number: self.stack.append(self.memo[number]),
            "GLOBAL": lambda pair: self.stack.append(_Global(str(pair).replace(" ", "."))),
            "STACK_GLOBAL": lambda _: self.name(self.pop(), self.pop()),
            "APPEND": lambda _: self.extend([self.pop()]),
            "APPENDS": lambda _: self.extend(self.to_mark()),
            "SETITEM": lambda _: self.update(list(reversed([self.pop(), self.pop()]))),
            "SETITEMS": lambda _: self.update(self.to_mark()),
            "NEWOBJ": lambda _: self.make(),
            "REDUCE": lambda _: self.make(),
            "BUILD": lambda _: self.build(),
        }

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise ValueError("a mark stands where a value is expected")
        return value

    def to_mark(self) -> list[Any]:
        for place in range(len(self.stack) - 1, -1, -1):
            if self.stack[place] is _MARK:
                values = self.stack[place + 1 :]
                del self.stack[place:]
                return values
        raise ValueError("a mark is missing")

    def tuple_of(self, count: int) -> None:
        values = [self.pop() for _ in range(count)]
        self.stack.append(tuple(reversed(values)))

    def remember(self, number: int) -> None:
        self.memo[number] = self.stack[-1]

    def extend(self, values: list[object]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise ValueError(f"something is added to a {type(target).__name__}")
        target.extend(values)

    def update(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(values) % 2:
            raise ValueError(f"something is set in a {type(target).__name__}")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str | _Record):
                raise ValueError(f"a {type(key).__name__} is a key; expected a name")
            target[key] = value

    def name(self, name: Any, module: Any) -> None:
        if type(name) is not str or type(module) is not str:  # a name of names would double with every instruction
            raise ValueError(f"a name is made of {_short(module)} and {_short(name)}")
        self.stack.append(_Global(f"{module}.{name}"))

    def make(self) -> None:
        args, name = self.pop(), self.pop()
        if not isinstance(name, _Global) or not isinstance(args, tuple):
            raise ValueError(f"something is called that is no class of a list: {_short(name)}")
        if not (name in _ALLOWED or name.startswith(_OF_LISTS) or name.partition(".")[0] == "pathlib"):
            raise ValueError(f"it names {name}, which no checkpoint of tensors needs; it is not run")
        self.stack.append(_Record(str(name), args))

    def build(self) -> None:
        state, record = self.pop(), self.stack[-1]
        if not isinstance(record, _Record) or record.state is not None:
            raise ValueError("a state is set on something that is no new record")
        record.state = state


_ALLOWED = frozenset(
    ("torch.Size", "torch.serialization._get_layout", "torch.distributed.checkpoint.filesystem._StorageInfo")
)


# -- what the records mean


def _entries(whole: object, *, most: int) -> dict[str, Entry]:
    """`most`: so many blocks there may be. Tensors may share a list of blocks, so a small file could ask for any number."""
    if not isinstance(whole, _Record) or whole.name != f"{_OF_LISTS}Metadata":
        raise ValueError(f"it holds a {getattr(whole, 'name', type(whole).__name__)}")
    parts: dict[str, list[Part]] = {}
    shapes: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
    listed, everything = {}, whole["state_dict_metadata"]
    for key, entry in everything.items():
        if entry.name == f"{_OF_LISTS}TensorStorageMetadata":
            listed[str(key)] = entry
            most -= len(entry["chunks"])
            if most < 0:
                raise ValueError("it names more blocks than it has room for")
            for chunk in entry["chunks"]:
                shapes[str(key), _size(chunk["offsets"])] = _size(chunk["sizes"])
    for index, info in whole["storage_data"].items():
        key = index["fqn"]
        if not isinstance(key, str) or key not in everything:
            raise ValueError(f"it says where {_short(key)} lies, which is none of its contents")
        if key not in listed:
            continue  # no tensor
        start = (0,) * len(_size(listed[key]["size"])) if index["offset"] is None else _size(index["offset"])
        parts.setdefault(key, []).append(_part(info, start, shapes[key, start]))
    made = {
        key: Entry(_size(entry["size"]), _dtype(entry["properties"]), tuple(parts.get(key, ())))
        for key, entry in listed.items()
    }
    for key, entry in made.items():
        check_entry(key, entry)
    _check_bytes(made)
    return made


def _check_bytes(entries: dict[str, Entry]) -> None:
    """Bytes belong to one part, or to the same part of a tensor with several names."""
    spans: dict[str, set[tuple[int, int]]] = {}
    for key, entry in entries.items():
        mine = {(part.file, part.offset, part.length) for part in entry.parts}
        if len(mine) != len(entry.parts):
            raise ValueError(f"two parts of {key} are the same bytes")
        for file, offset, length in mine:
            spans.setdefault(file, set()).add((offset, offset + length))
    for file, found in spans.items():
        for (_, end), (start, _) in pairwise(sorted(found)):
            if start < end:
                raise ValueError(f"two parts in {file} overlap at byte {start}")


def _part(info: _Record, start: tuple[int, ...], shape: tuple[int, ...]) -> Part:
    if info["relative_path"] != Path(info["relative_path"]).name or dict(info.state).get("transform_descriptors"):
        raise ValueError(
            f"a part is in {_short(info['relative_path'])}; expected a file in the folder, as it was written"
        )
    offset, length = info["offset"], info["length"]
    if not (isinstance(offset, int) and isinstance(length, int) and offset >= 0 and length >= 0):
        raise ValueError(f"a part has {_short(length)} bytes at {_short(offset)}")
    return Part(info["relative_path"], offset, length, UNKNOWN, "", start, shape)


def _size(value: object) -> tuple[int, ...]:
    (sizes,) = value.args if isinstance(value, _Record) and value.name == "torch.Size" else (None,)
    if (
        not isinstance(sizes, tuple)
        or not all(type(one) is int and 0 <= one < 1 << 62 for one in sizes)
        or len(sizes) > 64
    ):
        raise ValueError(f"{_short(sizes)} is no size")
    return sizes


def _short(value: object) -> str:
    """For an error. A list may hold another one twice, and so on: all of it may be longer than any memory."""
    return reprlib.repr(value)


def _dtype(properties: _Record) -> str:
    name = properties.state[0] if isinstance(properties.state, tuple) else properties["dtype"]
    if not isinstance(name, str):
        raise ValueError(f"{_short(name)} is no type of numbers")
    return dtype_name(dtype_named(str(name).removeprefix("torch.")))
