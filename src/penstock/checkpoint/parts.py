"""The parts of tensors in files: written as torch's checkpoints have them, read as bytes that have the right digest.

Each part is a record as `torch.save` makes it, so that torch's own loader finds it. The manifest says where in the
record the values begin; penstock reads them from there, and unpickles nothing.
"""

from __future__ import annotations

import hashlib
import io
import math
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from penstock.checkpoint.disk import Disk
from penstock.checkpoint.manifest import Damaged, Entry, Part, Sizes
from penstock.dtypes import dtype_named
from penstock.errors import StageError

Block = tuple[str, Sizes, Tensor]  # the key, the first corner in the whole tensor, the values


class _Hashing:
    """What `torch.save` writes to: the file, by way of the digest."""

    def __init__(self, disk: Disk, stream: BinaryIO) -> None:
        self.disk, self.stream = disk, stream
        self.digest = hashlib.sha256()
        self.error: OSError | None = None  # torch.save makes something unreadable of it

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        self.digest.update(view)
        try:
            self.disk.write(self.stream, view)
        except OSError as error:
            self.error = error
            raise
        return len(view)

    def flush(self) -> None:
        self.stream.flush()


def write_parts(file: Path, blocks: Iterable[Block], disk: Disk) -> list[tuple[str, Part]]:
    """One file with these blocks; what the manifest says of each."""
    found: list[tuple[str, Part]] = []
    with disk.create(file) as stream:
        for key, start, values in blocks:
            offset, plain = stream.tell(), _plain(values)
            out = _Hashing(disk, stream)
            try:
                torch.save(plain, out)  # type: ignore[arg-type]  # it only writes and flushes
            except RuntimeError:
                raise out.error or RuntimeError(f"torch cannot save {key}") from None
            stream.flush()
            data = _values_begin(file, offset) if plain.nbytes else 0
            digest, length = out.digest.hexdigest(), stream.tell() - offset
            found.append((key, Part(file.name, offset, length, data, digest, start, tuple(plain.shape))))
        disk.finish(stream)
    return found


def _plain(values: Tensor) -> Tensor:
    """On the host, with a storage of its own, which is what `torch.save` writes; its bytes are its values."""
    plain = values.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain if plain.untyped_storage().nbytes() == plain.nbytes else plain.clone()


def _values_begin(file: Path, offset: int) -> int:
    """Where the values stand in the record that ends the file: in the one member of the archive under data/."""
    with file.open("rb") as stream, zipfile.ZipFile(stream) as archive:
        (member,) = (one for one in archive.infolist() if one.filename.endswith("/data/0"))
        stream.seek(member.header_offset + 26)
        name, extra = (int.from_bytes(stream.read(2), "little") for _ in range(2))
        return member.header_offset + 30 + name + extra - offset


def chunk_of(tensor: Tensor) -> tuple[Sizes, Tensor] | None:
    """The first corner of the block of a tensor that is here, and the block; None if none of it is."""
    if not hasattr(tensor, "__create_chunk_list__"):
        return (0,) * tensor.ndim, tensor
    from penstock.stage.dtensors import to_local

    chunks = tensor.__create_chunk_list__()
    local = to_local(tensor)
    if not chunks or (local.numel() == 0 and tensor.numel() > 0):
        return None
    return tuple(chunks[0].offsets), local


def read_entry(folder: Path, entry: Entry, *, start: Sizes | None = None, shape: Sizes | None = None) -> Tensor:
    """A block of a saved tensor, out of the parts that touch it; by default all of it."""
    start, shape = start or (0,) * len(entry.shape), entry.shape if shape is None else shape
    try:
        made = torch.zeros(shape, dtype=dtype_named(entry.dtype))
    except (RuntimeError, MemoryError) as error:
        raise Damaged(f"{folder} has a tensor of {list(shape)} {entry.dtype}, for which there is no memory") from error
    for part in entry.parts:
        if (common := _common(start, shape, part)) is not None:
            here, there = common
            made[here] = read_part(folder, part, entry.dtype)[there]
    return made


def read_part(folder: Path, part: Part, dtype: str) -> Tensor:
    """The values of one part, if its bytes are those that were written."""
    kind = dtype_named(dtype)
    file = folder / part.file
    try:
        record = bytearray(part.length)
        with file.open("rb") as stream:
            stream.seek(part.offset)
            got = stream.readinto(record)
    except (OSError, MemoryError) as error:
        raise Damaged(f"{file} cannot be read: {str(error) or 'not enough memory'}") from error
    if not part.sha256:
        found = load_tensors(io.BytesIO(record), f"{file} cannot be read")
        if not isinstance(found, Tensor) or found.layout is not torch.strided or not found.is_cpu:
            raise StageError(f"{file} holds a {type(found).__name__} where a plain tensor should be")
        if tuple(found.shape) != part.shape or found.dtype is not kind:
            raise StageError(f"{file}: a part is {found.dtype} {list(found.shape)}, not {kind} {list(part.shape)}")
        return found.detach()
    if got != part.length or hashlib.sha256(record).hexdigest() != part.sha256:
        raise Damaged(
            f"{file} is damaged: bytes {part.offset} to {part.offset + part.length} are not those that were written"
        )
    if not (count := math.prod(part.shape)):
        return torch.empty(part.shape, dtype=kind)
    return torch.frombuffer(record, dtype=kind, count=count, offset=part.data).reshape(part.shape)


def load_tensors(source: Path | io.BytesIO, problem: str, advice: str = "") -> object:
    """What `torch.save` wrote, as tensors alone, mapped into memory if it is a file. An error says the problem and the advice."""
    try:
        archived = zipfile.is_zipfile(source)
        if archived:
            with zipfile.ZipFile(source) as archive:
                for one in archive.infolist():
                    if one.compress_type or one.file_size != one.compress_size:  # a small file may grow without end
                        raise ValueError(f"{one.filename:.80} in it is compressed, which torch.save never does")
        if isinstance(source, io.BytesIO):
            source.seek(0)
        return torch.load(source, map_location="cpu", weights_only=True, mmap=archived and isinstance(source, Path))
    except Exception as error:  # torch's reader raises whatever the bytes lead it to
        first = next(iter(str(error).splitlines()), "").partition(". ")[0]  # torch's next advice is to trust the file
        raise StageError(f"{problem}: {type(error).__name__}: {first}{advice}") from error


def _common(start: Sizes, shape: Sizes, part: Part) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where a block and a part overlap, as indices into each; None if they do not."""
    here, there = [], []
    for a, n, b, m in zip(start, shape, part.start, part.shape, strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None
        here.append(slice(low - a, high - a))
        there.append(slice(low - b, high - b))
    return tuple(here), tuple(there)
