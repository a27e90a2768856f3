"""A pipeline's weights as other programs read them: sharded safetensors with an index, and the config of a transformers model.

pipe.save_pretrained("mine/")
model = AutoModelForCausalLM.from_pretrained("mine/")        # without penstock

Each rank writes the tensors of its own stages, so no rank ever holds the whole model. What has several names is
written once, under the name that comes first in the model.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from torch import Tensor, nn

from penstock.errors import RunError
from penstock.front.mesh import PipelineMesh
from penstock.front.names import StageTensors
from penstock.nest import Value
from penstock.stage.dtensors import whole_tensor

_SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@dataclass(frozen=True)
class Origin:
    """What is remembered of the user's model when its stages have been cut; of stages made by hand, nothing."""

    names: frozenset[str] = frozenset()  # the first name of each parameter and buffer
    kind: str = ""
    configs: Mapping[str, object] | None = None  # of a transformers model: config, generation_config

    @classmethod
    def of(cls, model: nn.Module) -> Origin:
        names = [name for name, _ in model.named_parameters()] + [name for name, _ in model.named_buffers()]
        found = {name: getattr(model, name, None) for name in ("config", "generation_config")}
        configs = {name: one for name, one in found.items() if hasattr(one, "save_pretrained")}
        return cls(frozenset(names), type(model).__name__, configs)


def save_pretrained(
    place: Path, tensors: StageTensors, ends: PipelineMesh, origin: Origin, *, max_shard_bytes: int
) -> None:
    """Every rank of every replica calls it."""
    mine: dict[str, Tensor] = {}

    def look() -> list[list[object]]:
        _safetensors()
        if max_shard_bytes < 1:
            raise RunError(f"max_shard_bytes={max_shard_bytes}; expected a number of bytes")
        for name, value in tensors.state.items():
            if name not in tensors.elsewhere:
                # Of several names the one that comes first in the model itself; transformers ties the others to it.
                mine[next((one for one in tensors.spellings(name) if one in origin.names), name)] = value
        return [[name, value.nbytes] for name, value in mine.items()]

    everyone = ends.ranks.try_all("what is to be written", look)[: ends.num_ranks]  # the replicas hold the same names
    shards = _shards(everyone, max_shard_bytes)
    whole = {name: whole_tensor(value) for name, value in mine.items()}  # sharded ones put together on all replicas

    def write() -> None:
        if ends.replica > 0:
            return
        place.mkdir(parents=True, exist_ok=True)
        for number, (rank, names) in enumerate(shards):
            if rank == ends.rank:
                write_tensors(place / _name(number, len(shards)), {name: whole[name] for name in names})

    def finish() -> str:
        sizes = dict(row for rows in everyone for row in rows)
        where = {name: _name(number, len(shards)) for number, (_, names) in enumerate(shards) for name in names}
        written = set(where.values())
        if len(shards) > 1:
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(where.items()))}
            (place / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
            written.add(_INDEX)
        for file in place.iterdir():
            if _SHARD.fullmatch(file.name) and file.name not in written:
                file.unlink()  # of an earlier save with other stages
        for name, config in (origin.configs or {}).items():
            _write_config(name, config, place, origin, tensors)
        return str(place)

    ends.ranks.together(f"writing the weights to {place}", write)
    ends.ranks.broadcast(f"the index of the weights in {place}", finish)


_INDEX = "model.safetensors.index.json"


def _name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """A file of safetensors; a reader sees the old one, or the whole new one."""
    fresh = file.with_name(file.name + ".writing")
    plain = {name: value.cpu().contiguous() for name, value in tensors.items()}
    _safetensors().save_file(plain, fresh, {"format": "pt"})
    fresh.replace(file)


def _shards(everyone: Sequence[Sequence[tuple[str, int]]], most: int) -> list[tuple[int, list[str]]]:
    """(rank, names) of each file, in the order of the ranks; a name that several ranks hold goes to the first."""
    seen: set[str] = set()
    shards: list[tuple[int, list[str]]] = []
    for rank, rows in enumerate(everyone):
        size = most + 1  # as if the file before were full: each rank begins its own
        for name, length in rows:
            if name not in seen:
                seen.add(name)
                if size + length > most:
                    shards.append((rank, []))
                    size = 0
                shards[-1][1].append(name)
                size += length
    return shards


def _write_config(name: str, config: Value, place: Path, origin: Origin, tensors: StageTensors) -> None:
    own = copy.deepcopy(config)
    if name == "config":
        own.architectures = [origin.kind]
        dtype = next((value.dtype for value in tensors.parameters.values() if value.is_floating_point()), None)
        if dtype is not None and hasattr(own, "dtype"):
            own.dtype = dtype
    own.save_pretrained(place)


def _safetensors() -> ModuleType:
    try:
        from safetensors import torch as found
    except ImportError as error:
        raise RunError("save_pretrained needs the package safetensors: pip install safetensors") from error
    return found
