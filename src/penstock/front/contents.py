"""The list of a checkpoint's contents, which torch keeps as a pickle: read without running what it may say.

entries = tensor_entries(place)          # key -> size, type and where it lies
add_names(place, {"model.embed.weight": ["model.head.weight"]})

A parameter with several names is written once; `add_names` lets the list show it under each of them, so that a program
that knows nothing of penstock finds every name of its model.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from penstock.errors import RunError

_LIST = ".metadata"  # as torch calls it
_OF_TORCH = {
    "Size",
    "device",
    "dtype",
    "torch.serialization._get_layout",
    *(
        f"torch.distributed.checkpoint.metadata.{name}"
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
}
_PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}


class _Unpickler(pickle.Unpickler):
    """Knows the few kinds of value that such a list is made of."""

    def find_class(self, module: str, name: str) -> Any:
        import torch

        if module == "torch" and (name in _OF_TORCH or isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        if f"{module}.{name}" in _OF_TORCH or (module.partition(".")[0] == "pathlib" and name in _PATHS):
            return super().find_class(module, name)
        raise RunError(
            f"the list of contents names {module}.{name}, which no checkpoint of tensors needs; it is not run"
        )


class Reader(FileSystemReader):
    """Torch's reader of a folder, without its unpickling of whatever is there."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_list(Path(self.path))
        kept = metadata.storage_meta or StorageMeta()
        return replace(metadata, storage_meta=replace(kept, load_id=self.load_id))


def read_list(place: Path) -> Metadata:
    """What the checkpoint holds."""
    file = place / _LIST
    try:
        with file.open("rb") as stream:
            found = _Unpickler(stream).load()
    except (OSError, pickle.UnpicklingError, EOFError) as error:
        raise RunError(f"{file}, the list of what the checkpoint holds, cannot be read: {error}") from error
    if not isinstance(found, Metadata):
        raise RunError(f"{file} holds a {type(found).__name__}; expected torch's list of a checkpoint's contents")
    return found


def tensor_entries(place: Path) -> dict[str, TensorStorageMetadata]:
    metadata = read_list(place).state_dict_metadata
    return {key: entry for key, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}


def add_names(place: Path, names: Mapping[str, Sequence[str]]) -> None:
    """Let the list show what it has under a key under other keys too. Nothing is written twice."""
    metadata = read_list(place)
    entries, where = dict(metadata.state_dict_metadata), dict(metadata.storage_data)
    paths = dict(metadata.planner_data or {})
    for key, others in names.items():
        if key not in entries:
            continue
        places = [(index, info) for index, info in where.items() if index.fqn == key]
        head, _, _ = key.partition(".")
        for other in others:
            entries[other] = entries[key]
            where |= {replace(index, fqn=other): info for index, info in places}
            paths[other] = (head, other.removeprefix(f"{head}."))
    fresh = place / f"{_LIST}.new"
    with fresh.open("wb") as stream:
        pickle.dump(replace(metadata, state_dict_metadata=entries, storage_data=where, planner_data=paths), stream)
        stream.flush()
        os.fsync(stream.fileno())
    fresh.replace(place / _LIST)
