"""Weights by name, wherever they are: each tensor is read when somebody asks for it, and nothing else is.

weights = open_weights("llama/")       # safetensors or torch files, a folder or an index of them, a checkpoint
weights["model.layers.0.mlp.up_proj.weight"]

A pipeline asks for the tensors of its own stages, so no rank ever holds the whole model.
"""

from __future__ import annotations

import io
import json
import zipfile
from abc import abstractmethod
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from penstock.checkpoint.manifest import FILE, Entry, Manifest, Part, read_small
from penstock.checkpoint.parts import read_entry
from penstock.checkpoint.torch_list import LIST, read_list
from penstock.dtypes import dtype_named
from penstock.errors import StageError
from penstock.misfits import takes

Source = Mapping[str, Tensor] | str | Path | Sequence[str | Path]
INDEX_LIMIT = 1 << 28  # bytes of an index file
_OF_TORCH = (".pt", ".pth", ".bin", ".ckpt")
_NESTED = ("model", "state_dict", "model_state_dict", "module")  # where programs keep the weights in a file of torch's

Known = TypeVar("Known")
Answer = TypeVar("Answer")


class WeightFile(Mapping[str, Tensor], Generic[Known]):
    """Tensors by name, each read when it is asked for."""

    known: Mapping[str, Known]  # the names, and what is known of each

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """The tensor of a name that is known."""

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.known:
            raise KeyError(name)
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.known)

    def __len__(self) -> int:
        return len(self.known)

    def __contains__(self, name: object) -> bool:
        return name in self.known


class Safetensors(WeightFile[None]):
    def __init__(self, file: Path) -> None:
        self.file = file
        self.known = dict.fromkeys(self._call(lambda opened: opened.keys()))

    def read(self, name: str) -> Tensor:
        found: Tensor = self._call(lambda opened: opened.get_tensor(name))
        return found

    def _call(self, ask: Callable[[Any], Answer]) -> Answer:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise StageError(f"{self.file} needs the package safetensors: pip install safetensors") from error
        try:
            with safe_open(self.file, framework="pt") as opened:
                return ask(opened)
        except (SafetensorError, OSError) as error:
            raise StageError(f"{self.file} cannot be read as safetensors: {error}") from error


class TorchFile(WeightFile[Tensor]):
    """What `torch.save` wrote: mapped into memory, and read with weights_only."""

    def __init__(self, file: Path) -> None:
        try:
            _check_archive(file)
            whole = torch.load(file, map_location="cpu", weights_only=True, mmap=_is_zip(file))
        except Exception as error:  # torch's reader raises whatever the bytes lead it to
            raise StageError(
                f"{file} cannot be read as tensors alone: {_said(error)}. Save model.state_dict() with torch.save"
            ) from error
        for name in _NESTED:
            if isinstance(whole, Mapping) and isinstance(whole.get(name), Mapping):
                whole = whole[name]
        if not isinstance(whole, Mapping) or not any(isinstance(value, Tensor) for value in whole.values()):
            raise StageError(f"{file} holds a {type(whole).__name__}; expected a dictionary of names and tensors")
        self.known = {str(name): value for name, value in whole.items() if isinstance(value, Tensor)}

    def read(self, name: str) -> Tensor:
        return self.known[name]


class CheckpointFolder(WeightFile[Entry]):
    """A checkpoint: penstock's own, whose parts have digests, or torch's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if (folder / FILE).is_file():
            manifest = Manifest.read(folder)
            listed = dict(manifest.tensors)
            for name, others in manifest.aliases.items():
                if f"model.{name}" in listed:
                    listed |= {f"model.{other}": listed[f"model.{name}"] for other in others}
        else:
            listed = read_list(folder)
        inner = {key.removeprefix("model."): entry for key, entry in listed.items() if key.startswith("model.")}
        self.known = inner or listed

    def read(self, name: str) -> Tensor:
        entry = self.known[name]
        if entry.parts and all(part.sha256 for part in entry.parts):
            return read_entry(self.folder, entry, start=(0,) * len(entry.shape), shape=entry.shape)
        for part in entry.parts:  # so that no claim of the list takes more memory than there are bytes
            self._check_size(part)
        try:
            made = torch.empty(entry.shape, dtype=dtype_named(entry.dtype))
        except (RuntimeError, MemoryError) as error:
            raise StageError(
                f"{self.folder}: {name} is {list(entry.shape)}, which cannot be made: {_said(error)}"
            ) from error
        for part in entry.parts:
            place = tuple(slice(a, a + n) for a, n in zip(part.start, part.shape, strict=True))
            made[place] = self._unchecked(name, part, made.dtype)
        return made

    def _check_size(self, part: Part) -> None:
        file = self.folder / part.file
        has = file.stat().st_size if file.is_file() else 0
        if has < part.offset + part.length:
            raise StageError(f"{file} has {has} bytes; {LIST} says at least {part.offset + part.length}")

    def _unchecked(self, name: str, part: Part, dtype: torch.dtype) -> Tensor:
        """A record of torch's, which has no digest."""
        file = self.folder / part.file
        try:
            with file.open("rb") as stream:
                stream.seek(part.offset)
                record = io.BytesIO(stream.read(part.length))
            _check_archive(record)
            record.seek(0)
            found = torch.load(record, map_location="cpu", weights_only=True)
        except Exception as error:  # torch's reader raises whatever the bytes lead it to
            raise StageError(f"{file} cannot be read: {_said(error)}") from error
        if not isinstance(found, Tensor) or found.layout is not torch.strided or not found.is_cpu:
            raise StageError(f"{file} holds a {type(found).__name__} where a plain tensor should be")
        if tuple(found.shape) != part.shape or found.dtype is not dtype:
            raise StageError(
                f"{file}: a part of {name} is {found.dtype} {list(found.shape)}, not {dtype} {list(part.shape)}"
            )
        return found.detach()


class _Together(WeightFile[Path]):
    """Several files as one; each is opened when a name in it is asked for."""

    def __init__(self, where: Mapping[str, Path]) -> None:
        self.known = dict(where)
        self._opened: dict[Path, Mapping[str, Tensor]] = {}

    def read(self, name: str) -> Tensor:
        file = self.known[name]
        if file not in self._opened:
            self._opened[file] = _open_file(file)
        return self._opened[file][name]


def check_values(name: str, given: object) -> None:
    """Whether a parameter can take these values: torch itself finds out in the middle of copying."""
    if not isinstance(given, Tensor):
        what = f"a {type(given).__name__}"
    elif given.is_nested or given.layout is not torch.strided or given.is_quantized:
        what = "a nested, sparse or quantized tensor"
    elif given.is_meta:
        what = "a tensor without values, on the meta device"
    else:
        return
    raise StageError(f"the weights have {what} for {name}; expected a plain tensor")


def put(target: Tensor, values: Tensor) -> None:
    """Copy values into a tensor; of an expanded one, which torch refuses, into the elements that have memory of their own."""
    if 0 in target.stride():
        own = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in target.stride())
        target, values = target[own], values[own]
    target.copy_(values)


@takes(StageError)
def open_weights(source: Source) -> Mapping[str, Tensor]:
    """Weights by name out of a dictionary, a file, several, a folder, or a checkpoint."""
    if isinstance(source, Mapping):
        return source
    paths = [Path(source)] if isinstance(source, str | Path) else [Path(path) for path in source]
    parts: list[Any] = [_open_path(path) for path in paths]
    return ChainMap(*parts)


def _open_path(path: Path) -> Mapping[str, Tensor]:
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise StageError(f"{path} does not exist; expected a file or a folder with weights")
    return _of_index(path) if path.name.endswith(".index.json") else _open_file(path)


def _open_folder(folder: Path) -> Mapping[str, Tensor]:
    if (folder / FILE).is_file() or (folder / LIST).is_file():
        return CheckpointFolder(folder)
    for kind in (".safetensors", *_OF_TORCH):
        indices = sorted(folder.glob(f"*{kind}.index.json"))
        if indices:
            return _of_index(indices[0])
        files = sorted(folder.glob(f"*{kind}"))
        if files:
            return _Together({name: file for file in files for name in _open_file(file)})
    raise StageError(f"{folder} has no weights; expected .safetensors, {', '.join(_OF_TORCH)} files, or a checkpoint")


def _of_index(index: Path) -> Mapping[str, Tensor]:
    """Which file has which name, as transformers writes it."""
    try:
        where = json.loads(read_small(index, INDEX_LIMIT))["weight_map"]
        if not isinstance(where, dict):
            raise TypeError("weight_map is no object")
        files = {name: index.parent / Path(str(file)).name for name, file in where.items()}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise StageError(f"{index} is no index of weights: {error!r}") from error
    missing = sorted({file.name for file in files.values() if not file.is_file()})
    if missing:
        raise StageError(
            f"{index} names {', '.join(missing[:4])}, which {'is' if len(missing) == 1 else 'are'} not there"
        )
    return _Together(files)


def _open_file(file: Path) -> Mapping[str, Tensor]:
    """By its suffix; if that says nothing, by its first bytes."""
    if not file.is_file():
        raise StageError(f"{file} is no plain file")  # a pipe would keep its reader waiting
    if file.suffix == ".safetensors":
        return Safetensors(file)
    if file.suffix in _OF_TORCH or _is_zip(file):
        return TorchFile(file)
    return Safetensors(file)


def _check_archive(archive: Path | io.BytesIO) -> None:
    """What torch.save writes is not compressed: a small file that grows without end is none of its own."""
    if not zipfile.is_zipfile(archive):
        return
    with zipfile.ZipFile(archive) as opened:
        packed = [one.filename for one in opened.infolist() if one.compress_type or one.file_size != one.compress_size]
    if packed:
        raise ValueError(f"{packed[0]:.80} in it is compressed, which torch.save never does")


def _is_zip(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            return stream.read(2) == b"PK"
    except OSError as error:
        raise StageError(f"{file} cannot be read: {error}") from error


def _said(error: Exception) -> str:
    """The first line of an error, which may have none."""
    first = next(iter(str(error).splitlines()), "").partition(". ")[0]  # what torch advises next is to trust the file
    return f"{type(error).__name__}: {first}"
