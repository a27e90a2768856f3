"""Weights by name, wherever they are: each tensor is read when somebody asks for it, and nothing else is.

weights = open_weights("llama/")       # safetensors or torch files, a folder or an index of them, a checkpoint
weights["model.layers.0.mlp.up_proj.weight"]

A pipeline asks for the tensors of its own stages, so no rank ever holds the whole model.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.manifest import FILE, Manifest, check_size, read_small
from penstock.checkpoint.parts import load_tensors, read_entry
from penstock.checkpoint.torch_list import LIST, read_list
from penstock.checks import check_types
from penstock.errors import PenstockError, StageError

Source = Mapping[str, Tensor] | str | Path | Sequence[str | Path]
INDEX_LIMIT = 1 << 28  # bytes of an index file
_OF_TORCH = (".pt", ".pth", ".bin", ".ckpt")
_NESTED = ("model", "state_dict", "model_state_dict", "module")  # where programs keep the weights in a file of torch's


class Weights(Mapping[str, Tensor]):
    """Tensors by name, each read when it is asked for."""

    def __init__(self, names: Iterable[str], read: Callable[[str], Tensor]) -> None:
        self._names, self._read = dict.fromkeys(names), read

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


def _of_safetensors(file: Path) -> Mapping[str, Tensor]:
    def read(name: str) -> Tensor:
        with _opened(file) as opened:
            found: Tensor = opened.get_tensor(name)
            return found

    with _opened(file) as opened:
        return Weights(opened.keys(), read)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise StageError(f"{file} needs the package safetensors: pip install safetensors") from error
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise StageError(f"{file} cannot be read as safetensors: {error}") from error


def _of_torch_file(file: Path) -> Mapping[str, Tensor]:
    """What `torch.save` wrote: mapped into memory, and read with weights_only."""
    whole = load_tensors(file, f"{file} cannot be read as tensors alone", ". Save model.state_dict() with torch.save")
    for name in _NESTED:
        if isinstance(whole, Mapping) and isinstance(whole.get(name), Mapping):
            whole = whole[name]
    found = whole if isinstance(whole, Mapping) else {}
    tensors = {str(name): value for name, value in found.items() if isinstance(value, Tensor)}
    if not tensors:
        raise StageError(f"{file} holds a {type(whole).__name__}; expected a dictionary of names and tensors")
    return tensors


def _of_checkpoint(folder: Path) -> Mapping[str, Tensor]:
    """A checkpoint: penstock's own, whose parts have digests, or torch's."""
    listed = Manifest.read(folder).by_every_name() if (folder / FILE).is_file() else read_list(folder)
    inner = {key.removeprefix("model."): entry for key, entry in listed.items() if key.startswith("model.")}
    known = inner or listed

    def read(name: str) -> Tensor:
        entry = known[name]
        try:
            # So that no claim of a list takes more memory than there are bytes.
            for file, offset, length in entry.spans:
                check_size(folder / file, offset + length, LIST)
            return read_entry(folder, entry)
        except PenstockError as error:
            raise type(error)(f"{name} cannot be read: {error}") from error

    return Weights(known, read)


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


def open_weights(source: Source) -> Mapping[str, Tensor]:
    """Weights by name out of a dictionary, a file, several, a folder, or a checkpoint."""
    check_types("open_weights", StageError, source=(source, Source))
    if isinstance(source, Mapping):
        return source
    paths = [Path(source)] if isinstance(source, str | Path) else [Path(path) for path in source]
    parts = [_open_path(path) for path in paths]
    where = {name: part for part in reversed(parts) for name in part}
    return Weights(where, lambda name: where[name][name])


def _open_path(path: Path) -> Mapping[str, Tensor]:
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise StageError(f"{path} does not exist; expected a file or a folder with weights")
    return _of_index(path) if path.name.endswith(".index.json") else _open_file(path)


def _open_folder(folder: Path) -> Mapping[str, Tensor]:
    if (folder / FILE).is_file() or (folder / LIST).is_file():
        return _of_checkpoint(folder)
    for kind in (".safetensors", *_OF_TORCH):
        indices = sorted(folder.glob(f"*{kind}.index.json"))
        if indices:
            return _of_index(indices[0])
        files = sorted(folder.glob(f"*{kind}"))
        if files:
            return open_weights(files[::-1])  # of a name that several of them have, the last file counts
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
    opened = cache(_open_file)  # each file when a name in it is asked for
    return Weights(files, lambda name: opened(files[name])[name])


def _open_file(file: Path) -> Mapping[str, Tensor]:
    """By its suffix; if that says nothing, by what it is."""
    if not file.is_file():
        raise StageError(f"{file} is no plain file")  # a pipe would keep its reader waiting
    archive = file.suffix != ".safetensors" and zipfile.is_zipfile(file)
    return _of_torch_file(file) if archive or file.suffix in _OF_TORCH else _of_safetensors(file)
