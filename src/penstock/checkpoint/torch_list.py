"""Torch's list of a checkpoint's contents (`.metadata`): written for programs without penstock, read without trusting it.

    data = write_list(manifest)                    # what torch.distributed.checkpoint expects to find
    entries = read_list(folder)                    # of a checkpoint that torch alone has written

The list is a pickle, and unpickling runs what a pickle says. So penstock has a reader of its own: the few instructions that
such a list is made of build inert records (`_Record`: a name, arguments, a state), and any other is refused; nothing is imported,
called or set on an object of anybody's. What the records mean is decided afterwards, by their names.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from reprlib import repr as short

from penstock.checkpoint.manifest import Damaged, Entry, Manifest, Part, check_entry, check_overlaps, read_small, sizes
from penstock.dtypes import dtype_name, dtype_named
from penstock.nest import Value

LIST = ".metadata"  # as torch calls it
LIMIT = 1 << 30
UNKNOWN = -1  # where the values of a part begin, if penstock did not write it
_OF_LISTS = "torch.distributed.checkpoint.metadata."
_ALLOWED = ("torch.Size", "torch.serialization._get_layout", "torch.distributed.checkpoint.filesystem._StorageInfo")
_PLAIN = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.BUILD),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.BINFLOAT, pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT),
    *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
)
"""The instructions that are safe as Python has them. They call nothing, but for BUILD, whose state records take themselves."""


def write_list(manifest: Manifest) -> bytes:
    """The manifest as torch's own classes, pickled. A tensor with several names is shown under each, and lies there once."""
    from torch import Size
    from torch.distributed.checkpoint import metadata as torchs
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    listed: dict[str, torchs.TensorStorageMetadata | torchs.BytesStorageMetadata] = {}
    where, paths = {}, {}
    for name, entry in manifest.by_every_name().items():
        chunks = [torchs.ChunkStorageMetadata(Size(part.start), Size(part.shape)) for part in entry.parts]
        properties = torchs.TensorProperties(dtype=dtype_named(entry.dtype))
        listed[name] = torchs.TensorStorageMetadata(properties, Size(entry.shape), chunks)
        paths[name] = _path(name)
        for number, part in enumerate(entry.parts):
            index = torchs.MetadataIndex(name, part.start, number)
            where[index] = _StorageInfo(part.file, part.offset, part.length)
    return pickle.dumps(torchs.Metadata(listed, paths, where, torchs.StorageMeta(), version="1.0.0"))


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
    data = read_small(file, LIMIT)
    try:
        return _entries(_ListReader(io.BytesIO(data)).load(), most=len(data) // 16)  # a block takes some sixty bytes
    except Exception as error:  # Python's reader raises whatever the bytes lead it to
        raise Damaged(f"{file}, torch's list of what the checkpoint holds, cannot be read: {error}") from error


class _Record:
    """Something that the pickle would have made."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Value, ...]) -> None:
        self.name, self.args = name, args
        self.state: Value = None

    def __setstate__(self, state: Value) -> None:
        if self.state is not None:
            raise ValueError("a state is set on something that is no new record")
        self.state = state

    def __getitem__(self, field: str) -> Value:
        if not isinstance(self.state, dict):
            raise ValueError(f"a {self.name} without fields")
        return self.state[field]


class _Global(str):
    """The name of a class or function; only a name. It is no plain text, so that names cannot be made of names without end."""

    __slots__ = ()


class _Instructions(dict[int, Callable[[Value], None]]):
    """What the reader does at each byte that is an instruction of a list of contents."""

    def __missing__(self, code: int) -> Callable[[Value], None]:
        name = next((op.name for op in pickletools.opcodes if ord(op.code) == code), code)
        raise ValueError(f"it says {name}, which no list of tensors needs; it is not run")


class _ListReader(pickle._Unpickler):
    """Python's own reader, in Python, with few of its instructions: what a pickle would make or call becomes a record."""

    stack: list[Value]
    pop_mark: Callable[[], list[Value]]

    def find_class(self, module: str, name: str) -> _Global:
        return _Global(f"{module}.{name}")

    def make(self) -> None:
        args, name = self.stack.pop(), self.stack.pop()
        if not isinstance(name, _Global) or not isinstance(args, tuple):
            raise ValueError(f"something is called that is no class of a list: {short(name)}")
        if not (name in _ALLOWED or name.startswith(_OF_LISTS) or name.partition(".")[0] == "pathlib"):
            raise ValueError(f"it names {name}, which no checkpoint of tensors needs; it is not run")
        self.stack.append(_Record(str(name), args))

    def update(self, values: list[Value]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(values) % 2:
            raise ValueError(f"something is set in a {type(target).__name__}")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str | _Record):  # to hash a tuple of tuples of tuples may take for ever
                raise ValueError(f"a {type(key).__name__} is a key; expected a name")
            target[key] = value

    dispatch = _Instructions({code[0]: pickle._Unpickler.dispatch[code[0]] for code in _PLAIN})
    dispatch |= {
        pickle.REDUCE[0]: make,
        pickle.NEWOBJ[0]: make,
        pickle.SETITEM[0]: lambda self: self.update([self.stack.pop(-2), self.stack.pop()]),
        pickle.SETITEMS[0]: lambda self: self.update(self.pop_mark()),
    }


# -- what the records mean


def _entries(whole: object, *, most: int) -> dict[str, Entry]:
    """`most`: so many blocks there may be. Tensors may share a list of blocks, so a small file could ask for any number."""
    if not isinstance(whole, _Record) or whole.name != f"{_OF_LISTS}Metadata":
        raise ValueError(f"it holds a {getattr(whole, 'name', type(whole).__name__)}")
    parts: dict[str, list[Part]] = {}
    everything, kind = whole["state_dict_metadata"], f"{_OF_LISTS}TensorStorageMetadata"
    listed = {str(key): entry for key, entry in everything.items() if entry.name == kind}
    if sum(len(entry["chunks"]) for entry in listed.values()) > most:
        raise ValueError("it names more blocks than it has room for")
    chunks = [(key, chunk) for key, entry in listed.items() for chunk in entry["chunks"]]
    shapes = {(key, _size(key, chunk["offsets"])): _size(key, chunk["sizes"]) for key, chunk in chunks}
    for index, info in whole["storage_data"].items():
        key = index["fqn"]
        if not isinstance(key, str) or key not in everything:
            raise ValueError(f"it says where {short(key)} lies, which is none of its contents")
        if key not in listed:
            continue  # no tensor
        whole_size = _size(key, listed[key]["size"])
        start = (0,) * len(whole_size) if index["offset"] is None else _size(key, index["offset"])
        parts.setdefault(key, []).append(_part(info, start, shapes[key, start]))
    made = {
        key: Entry(_size(key, entry["size"]), _dtype(entry["properties"]), tuple(parts.get(key, ())))
        for key, entry in listed.items()
    }
    for key, entry in made.items():
        check_entry(key, entry)
        if len({*entry.spans}) != len(entry.spans):
            raise ValueError(f"two parts of {key} are the same bytes")
    check_overlaps({span for entry in made.values() for span in entry.spans})  # one with several names lies there once
    return made


def _part(info: _Record, start: tuple[int, ...], shape: tuple[int, ...]) -> Part:
    file, offset, length = info["relative_path"], info["offset"], info["length"]
    if file != Path(file).name or dict(info.state).get("transform_descriptors"):
        raise ValueError(f"a part is in {short(file)}; expected a file in the folder, as it was written")
    if not (isinstance(offset, int) and isinstance(length, int) and offset >= 0 and length >= 0):
        raise ValueError(f"a part has {short(length)} bytes at {short(offset)}")
    return Part(file, offset, length, UNKNOWN, "", start, shape)


def _size(key: str, value: object) -> tuple[int, ...]:
    return sizes(key, *(value.args if isinstance(value, _Record) and value.name == "torch.Size" else (None,)))


def _dtype(properties: _Record) -> str:
    name = properties.state[0] if isinstance(properties.state, tuple) else properties["dtype"]
    if not isinstance(name, str):
        raise ValueError(f"{short(name)} is no type of numbers")
    return dtype_name(dtype_named(name.removeprefix("torch.")))
