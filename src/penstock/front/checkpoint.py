"""Checkpoints on torch.distributed.checkpoint: by the names of the user's model, whatever the ranks and stages.

    pipe.save("run/checkpoint", optimizer=optimizer, extra={"epoch": 3})
    pipe.load("run/checkpoint", optimizer=optimizer)            # with any other number of ranks and stages
    model.load_state_dict(penstock.load("run/checkpoint").model)         # the plain model, in one process

Without penstock: ``dcp.load({"model": model.state_dict()}, checkpoint_id="run/checkpoint")``, or torch's own tool, which
makes one file of it: ``python -m torch.distributed.checkpoint.format_utils dcp_to_torch run/checkpoint model.pt``.

A checkpoint is written beside its place and renamed into it. A crash in between leaves the one before: where it was, or,
in the instant between two renames, under the same name with ".old", where `load` looks as well.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from penstock.errors import RunError, StageError, TransportError
from penstock.front import moments
from penstock.front.contents import Reader, add_names, tensor_entries
from penstock.front.ends import Ends
from penstock.front.names import StageTensors, unknown
from penstock.front.spread import receive_from, send_to

FACTS = "penstock.json"
_FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint in one process."""

    model: dict[str, Tensor]  # a plain state dict: every name of the model
    optimizer: dict[str, dict[str, Any]]  # by name of the parameter: the state of the optimizer
    param_groups: list[dict[str, Any]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)


# -- saving


def save(
    folder: str | Path,
    tensors: StageTensors,
    ends: Ends,
    *,
    optimizer: Any = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint; every rank of every replica calls it."""
    place = Path(folder).absolute()
    fresh = place.with_name(place.name + ".saving")
    notes = _as_json(extra or {})
    model = {name: value.detach() for name, value in tensors.state.items() if name not in tensors.elsewhere}
    state, values, groups = moments.parts(optimizer, tensors)
    facts = ends.gather("what a checkpoint holds", [tensors.aliases, values, groups])

    def begin() -> str:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        return ""

    def end() -> str:
        _write_facts(fresh, facts, notes)
        _swap(fresh, place)
        return ""

    ends.decide("a folder for the checkpoint", begin)
    _write(fresh, model, state, ends)
    ends.decide("the end of a checkpoint", end)


def _as_json(extra: Mapping[str, Any]) -> dict[str, Any]:
    try:
        made: dict[str, Any] = json.loads(json.dumps(dict(extra)))
    except (TypeError, ValueError) as error:
        raise RunError(
            f"extra cannot be saved: {error}; expected numbers, texts, lists and dictionaries of them. What has tensors "
            "belongs into the model or the optimizer"
        ) from error
    return made


def _write(fresh: Path, model: dict[str, Tensor], state: dict[str, dict[str, Tensor]], ends: Ends) -> None:
    from penstock.comm.distributed import DistributedTransport

    if isinstance(ends.transport, DistributedTransport):
        group = None if ends.mesh is not None else ends.group
        writer = FileSystemWriter(fresh, single_file_per_rank=True)
        try:
            state_dict_saver.save(_tree(model, state), storage_writer=writer, process_group=group)
        except CheckpointException as error:
            reasons = "; ".join(f"rank {rank}: {reason}" for rank, (reason, _) in error.failures.items())
            raise RunError(f"the checkpoint {fresh} cannot be written: {reasons}") from error
        except RuntimeError as error:
            raise TransportError(f"rank {ends.rank}, while all ranks write the checkpoint {fresh}: {error}") from error
        return
    if ends.rank > 0:
        send_to(ends.transport, [0], [model, state])
        return
    for rank in range(1, ends.transport.num_ranks):
        others, moments = receive_from(ends.transport, rank)
        model |= others
        state |= moments
    with _alone():
        state_dict_saver.save(_tree(model, state), storage_writer=FileSystemWriter(fresh), no_dist=True)


def _tree(model: dict[str, Tensor], state: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    """As programs without penstock write and read it: torch makes "model.NAME" and "optimizer.state.NAME.KEY" of it."""
    parts: dict[str, Any] = {"model": model} if model else {}
    return {**parts, "optimizer": {"state": state}} if state else parts


def _write_facts(fresh: Path, everyone: list[Any], extra: Mapping[str, Any]) -> None:
    aliases: dict[str, list[str]] = {}
    values: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for names, plain, listed in everyone:
        aliases |= names
        values |= plain
        for index, group in enumerate(listed):
            if index == len(groups):
                groups.append({**group, "names": []})
            groups[index]["names"] = sorted({*groups[index]["names"], *group["names"]})
    facts = {
        "format": _FORMAT,
        "aliases": aliases,
        "optimizer_values": values,
        "param_groups": groups,
        "extra": dict(extra),
    }
    add_names(fresh, {f"model.{name}": [f"model.{other}" for other in others] for name, others in aliases.items()})
    with (fresh / FACTS).open("w", encoding="utf-8") as file:
        json.dump(facts, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _swap(fresh: Path, place: Path) -> None:
    old = place.with_name(place.name + ".old")
    if place.exists():
        shutil.rmtree(old, ignore_errors=True)
        place.rename(old)
    fresh.rename(place)
    shutil.rmtree(old, ignore_errors=True)


# -- loading


def found(folder: str | Path) -> Path:
    """The checkpoint of that name, or the one before if a crash fell between two renames."""
    place = Path(folder)
    for candidate in (place, place.with_name(place.name + ".old")):
        if (candidate / FACTS).is_file():
            return candidate
    raise RunError(f"{place} is no checkpoint: it has no {FACTS}; give the folder that pipe.save() was given")


def _facts(place: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((place / FACTS).read_text(encoding="utf-8"))
    if facts.get("format") != _FORMAT:
        raise RunError(f"{place} has format {facts.get('format')!r}, this penstock reads {_FORMAT}")
    return facts


def load(folder: str | Path) -> Checkpoint:
    """All of a checkpoint as plain tensors, in one process.

    model.load_state_dict(penstock.load("run/checkpoint").model)
    """
    place = found(folder)
    facts = _facts(place)
    again = {f"model.{other}" for others in facts["aliases"].values() for other in others}
    state = {key: moments.room(entry) for key, entry in tensor_entries(place).items() if key not in again}
    _read(place, state)
    model = {key.removeprefix("model."): value for key, value in state.items() if key.startswith("model.")}
    for name, others in facts["aliases"].items():
        if name in model:
            model |= dict.fromkeys(others, model[name])
    names = {name for group in facts["param_groups"] for name in group["names"]}
    optimizer: dict[str, dict[str, Any]] = {}
    for name in names:
        prefix = f"optimizer.state.{name}."
        own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        own |= {k.removeprefix(f"{name}."): v for k, v in facts["optimizer_values"].items() if k.startswith(f"{name}.")}
        optimizer[name] = {key: value for key, value in own.items() if "." not in key}
    extra = {key: value for key, value in facts["extra"].items() if key != "penstock"}  # our own notes
    return Checkpoint(model, optimizer, facts["param_groups"], extra)


def load_into(folder: str | Path, tensors: StageTensors, *, optimizer: Any = None) -> dict[str, Any]:
    """Read what this rank needs into the stages' tensors and the optimizer; `extra` comes back."""
    place = found(folder)
    facts, entries = _facts(place), tensor_entries(place)
    state: dict[str, Tensor] = {}
    missing = []
    for name, value in tensors.state.items():
        spellings = (name, *tensors.aliases.get(name, ()))
        key = next((f"model.{spelling}" for spelling in spellings if f"model.{spelling}" in entries), None)
        if key is None:
            missing.append(name)
        else:
            state[key] = value.detach()
    if missing:
        have = [key.removeprefix("model.") for key in entries if key.startswith("model.")]
        raise unknown(missing, have, f"{place} lacks tensors of this model")
    pending = moments.targets(optimizer, tensors, entries)
    _read(place, {**state, **{key: value for key, _, _, value in pending}})
    tensors.level()
    if optimizer is not None:
        moments.fill(optimizer, tensors, facts, pending)
    return dict(facts["extra"])


def copy_state(tensors: StageTensors, state: Mapping[str, Tensor], *, strict: bool) -> None:
    """From a state dict in memory, by any name of each tensor."""
    missing = []
    with torch.no_grad():
        for name, value in tensors.state.items():
            key = next((n for n in (name, *tensors.aliases.get(name, ())) if n in state), None)
            if key is None:
                missing.append(name)
                continue
            given = state[key]
            if hasattr(value, "placements") and not hasattr(given, "placements"):
                from torch.distributed.tensor import distribute_tensor

                spread: Any = value
                given = distribute_tensor(given.to(value.device), spread.device_mesh, spread.placements)
            if given.shape != value.shape:
                raise StageError(f"{key} is {list(given.shape)} in the state dict and {list(value.shape)} in the model")
            value.copy_(given)
    tensors.level()
    if strict and missing:
        raise unknown(missing, state, "the state dict lacks tensors of this rank's stages")


def _read(place: Path, state: dict[str, Tensor]) -> None:
    """Each process reads what it needs; torch reads values with weights_only, and `Reader` the list of them."""
    if state:
        with _alone():
            state_dict_loader.load(state, storage_reader=Reader(place), no_dist=True)


@contextmanager
def _alone() -> Iterator[None]:
    """One process reads or writes by itself: torch warns of what is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
