"""The manifest of a checkpoint: every name, shape, type and file, and the SHA-256 of each part. Plain JSON.

manifest = Manifest.read(folder)             # checked from end to end before any other file is opened
manifest.tensors["model.embed.weight"].parts[0].file

Nothing that penstock loads is found by torch's own list (`.metadata`, a pickle), which stands beside it for programs
without penstock.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from reprlib import repr as short

from penstock.checks import fits
from penstock.dtypes import dtype_named
from penstock.errors import RunError, StageError
from penstock.nest import Value

FILE = "penstock.json"
FORMAT = 2
LIMIT = 1 << 30  # bytes of a manifest; a part of a tensor takes about 250
_RECORD = 1 << 20  # bytes of a record beside its values, at the most: a file may claim any size and hold nothing
_MOST_ABREAST = 128  # parts of a tensor that lie side by side, whichever way one looks; that takes 128 x 128 ranks
Sizes = tuple[int, ...]  # of a tensor or a part, or where a part begins: a number for each dimension
Span = tuple[str, int, int]  # of bytes: the file, where they begin, how many they are
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")  # of a file in the checkpoint's own folder


class Damaged(RunError):
    """A checkpoint, or a file of it, is not what was written."""


@dataclass(frozen=True)
class Part:
    """A block of a tensor, and where its bytes lie."""

    file: str
    offset: int  # where torch's record of this block begins in the file
    length: int  # bytes of that record
    data: int  # where in the record the values themselves begin
    sha256: str  # of the record
    start: Sizes  # the block's first corner in the tensor
    shape: Sizes


@dataclass(frozen=True)
class Entry:
    """A tensor."""

    shape: Sizes
    dtype: str
    parts: tuple[Part, ...]

    @property
    def spans(self) -> list[Span]:
        return [(part.file, part.offset, part.length) for part in self.parts]


@dataclass(frozen=True)
class SmallFile:
    """A file that is read whole."""

    size: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> SmallFile:
        return cls(len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True)
class Manifest:
    """All that a checkpoint holds."""

    step: int
    ranks: int
    replicas: int
    versions: Mapping[str, str]  # of penstock and torch, which wrote it
    tensors: Mapping[str, Entry]
    files: Mapping[str, SmallFile]  # all but those with tensors
    aliases: Mapping[str, list[str]] = field(default_factory=dict)  # other names of a model's tensor
    optimizer: Mapping[str, Value] = field(default_factory=dict)  # its kind, its plain values by parameter, its groups
    extra: Mapping[str, Value] = field(default_factory=dict)  # the user's

    def dumps(self) -> bytes:
        body = json.dumps(asdict(self))
        digest = hashlib.sha256(body.encode()).hexdigest()
        return f'{{"format": {FORMAT}, "digest": "{digest}",\n"checkpoint": {body}}}\n'.encode()

    @property
    def digest(self) -> str:
        """A text that is equal for equal contents."""
        return hashlib.sha256(self.dumps()).hexdigest()

    @classmethod
    def loads(cls, data: bytes, *, source: str = "the manifest") -> Manifest:
        try:
            whole = json.loads(data)
            facts = known_object(whole, {"format": int, "digest": str, "checkpoint": dict}, "it", all_needed=False)
            if facts.get("format") != FORMAT:
                raise Damaged(
                    f"{source} has format {facts.get('format')!r}, this penstock reads {FORMAT}; make one file of it with "
                    "torch's own tool, python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER model.pt, and "
                    "give that as weights="
                )
            if facts["digest"] != hashlib.sha256(json.dumps(facts["checkpoint"]).encode()).hexdigest():
                raise Damaged(f"{source} is damaged: its contents do not have the digest that stands in it")
            return _manifest(facts["checkpoint"])
        except (ValueError, RecursionError, KeyError, StageError) as error:
            raise Damaged(f"{source} is no manifest of a checkpoint: {error}") from error

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a checkpoint, and see whether its files have the sizes that it says."""
        file = folder / FILE
        made = cls.loads(read_small(file, LIMIT), source=str(file))
        for name, length in made.sizes().items():
            check_size(folder / name, length, "the manifest")
        return made

    def small(self, folder: Path, name: str) -> bytes:
        """The bytes of a small file, if they are those that were written."""
        known = self.files.get(name)
        if known is None:
            raise Damaged(f"{folder} has no {name}, as far as its manifest says")
        data = read_small(folder / name, known.size)
        if hashlib.sha256(data).hexdigest() != known.sha256:
            raise Damaged(f"{folder / name} is damaged: its bytes are not those that were written")
        return data

    def by_every_name(self) -> dict[str, Entry]:
        """The tensors; one with several names stands there under each of them."""
        found = dict(self.tensors)
        for name, others in self.aliases.items():
            if entry := self.tensors.get(f"model.{name}"):
                found |= {f"model.{other}": entry for other in others}
        return found

    def sizes(self) -> dict[str, int]:
        """The bytes that each file has at least."""
        found = {name: small.size for name, small in self.files.items()}
        for entry in self.tensors.values():
            for file, offset, length in entry.spans:
                found[file] = max(found.get(file, 0), offset + length)
        return found


def check_size(file: Path, length: int, source: str) -> None:
    """A file is there with as many bytes as something says, and maybe more."""
    has = file.stat().st_size if file.is_file() else None
    if has is None or has < length:
        raise Damaged(f"{file} {'is missing' if has is None else f'has {has} bytes'}; {source} says {length} bytes")


def read_small(file: Path, limit: int) -> bytes:
    """The bytes of a file that is not larger than that."""
    try:
        status = file.stat()
        size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            raise Damaged(f"{file} is no plain file")  # a pipe would keep its reader waiting
        if size > limit:
            raise Damaged(f"{file} has {size:,} bytes; at most {limit:,} are read")
        return file.read_bytes()
    except OSError as error:
        raise Damaged(f"{file} cannot be read: {error}") from error


# -- from JSON, checked


def known_object(value: object, kinds: Mapping[str, object], what: str, *, all_needed: bool = True) -> dict[str, Value]:
    if not isinstance(value, dict) or not value.keys() <= kinds.keys() or (all_needed and value.keys() != kinds.keys()):
        raise ValueError(f"{what} is {short(value)}; expected an object with {', '.join(kinds)}")
    for name, one in value.items():
        kind = kinds[name]
        if not fits(one, kind) or (isinstance(one, bool) and kind is int):
            raise ValueError(
                f"{what} has {name}: {short(one)}; expected {kind.__name__ if isinstance(kind, type) else kind}"
            )
        if isinstance(one, int) and not 0 <= one < 1 << 62:
            raise ValueError(f"{what} has {name}: {short(one)}; expected a number from 0")
    return value


def _manifest(body: dict[str, object]) -> Manifest:
    facts = known_object(body, _CHECKPOINT, "the checkpoint")
    tensors = {name: _entry(name, entry) for name, entry in facts["tensors"].items()}
    files = {
        _file(name): SmallFile(**known_object(one, {"size": int, "sha256": str}, name))
        for name, one in facts["files"].items()
    }
    if large := [name for name, one in files.items() if one.size > LIMIT]:
        raise ValueError(f"{large[0]} has {files[large[0]].size:,} bytes; at most {LIMIT:,} are read")
    if facts["optimizer"]:
        for group in known_object(facts["optimizer"], _OPTIMIZER, "the optimizer")["groups"]:
            known_object(group, {"options": dict, "names": list[str]}, "a group of the optimizer")
    check_overlaps(span for entry in tensors.values() for span in entry.spans)
    return Manifest(**{**facts, "tensors": tensors, "files": files})


def _entry(name: str, value: object) -> Entry:
    facts = known_object(value, {"shape": list, "dtype": str, "parts": list}, name)
    made = Entry(sizes(name, facts["shape"]), facts["dtype"], tuple(_part(name, one) for one in facts["parts"]))
    check_entry(name, made)
    return made


def check_entry(name: str, entry: Entry) -> None:
    """The parts make up the tensor, each element once, and each has bytes enough: no element is ever made up."""
    shape, dtype = entry.shape, dtype_named(entry.dtype)
    for part in entry.parts:
        values = math.prod(part.shape) * dtype.itemsize
        if len(part.start) != len(shape) or len(part.shape) != len(shape):
            raise ValueError(f"{name} has {len(shape)} dimensions, and a part with {len(part.shape)}")
        if any(a + b > c for a, b, c in zip(part.start, part.shape, shape, strict=True)):
            raise ValueError(f"{name} is {list(shape)}, and a part of {list(part.shape)} begins at {list(part.start)}")
        if max(part.data, 0) + values > part.length:
            raise ValueError(f"{name} has a part of {list(part.shape)} {entry.dtype} in {part.length} bytes")
        if part.length > values + _RECORD:
            raise ValueError(f"{name} has {part.length:,} bytes for a part of {list(part.shape)} {entry.dtype}")
    if sum(math.prod(part.shape) for part in entry.parts) != math.prod(shape):
        raise ValueError(f"the parts of {name} do not make up {list(shape)}")
    _check_blocks(name, entry)


def _check_blocks(name: str, entry: Entry) -> None:
    """No two parts of a tensor have an element in common."""
    parts = [part for part in entry.parts if math.prod(part.shape)]
    if len(parts) < 2:
        return
    along = max(range(len(entry.shape)), key=lambda d: len({part.start[d] for part in parts}))
    parts.sort(key=lambda part: part.start[along])
    open_ones: list[Part] = []  # those that reach to where the next one begins
    for part in parts:
        open_ones = [other for other in open_ones if other.start[along] + other.shape[along] > part.start[along]]
        if len(open_ones) > _MOST_ABREAST:  # each would be held against each
            raise ValueError(f"more than {_MOST_ABREAST} parts of {name} lie side by side")
        for other in open_ones:
            pairs = zip(part.start, part.shape, other.start, other.shape, strict=True)
            if all(a < b + m and b < a + n for a, n, b, m in pairs):
                raise ValueError(f"two parts of {name} overlap, at {list(part.start)} and at {list(other.start)}")
        open_ones.append(part)


def _part(name: str, value: object) -> Part:
    facts = known_object(value, _PART, f"a part of {name}")
    _file(facts["file"])
    return Part(**{**facts, "start": sizes(name, facts["start"]), "shape": sizes(name, facts["shape"])})


def sizes(name: str, value: object) -> Sizes:
    """The sizes of a tensor, or of a part, as they stand in a file."""
    if not isinstance(value, list | tuple) or not all(type(one) is int and 0 <= one < 1 << 62 for one in value[:65]):
        raise ValueError(f"{name} has the sizes {short(value)}; expected whole numbers from 0")
    if len(value) > 64:
        raise ValueError(f"{name} has {len(value)} dimensions; expected at most 64")
    return tuple(value)


def _file(name: object) -> str:
    """A plain name: nothing outside the checkpoint's folder is ever opened."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in (".", ".."):
        raise ValueError(f"{short(name)} is no name of a file in the checkpoint's folder")
    return name


def check_overlaps(spans: Iterable[Span]) -> None:
    """Each byte belongs to one part, so that what is read is never more than what is there."""
    for (file, offset, length), (other, start, _) in pairwise(sorted(spans)):
        if file == other and start < offset + length:
            raise ValueError(f"two parts in {file} overlap at byte {start}")


_CHECKPOINT = {
    **{each.name: dict for each in fields(Manifest)},
    **dict.fromkeys(("step", "ranks", "replicas"), int),
    "versions": dict[str, str],
    "aliases": dict[str, list[str]],
}
_OPTIMIZER = {"kind": str, "values": dict[str, dict[str, object]], "groups": list}
_PART = {**{each.name: int for each in fields(Part)}, "file": str, "sha256": str, "start": list, "shape": list}
