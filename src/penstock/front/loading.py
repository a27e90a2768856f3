"""Reading a checkpoint: all ranks read and check what they need, agree on what it is, and only then change anything.

extra = pipe.load("run/checkpoint", optimizer=optimizer)             # with any other number of ranks and stages
model.load_state_dict(penstock.load("run/checkpoint").model)         # the plain model, in one process
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from penstock.checkpoint import kept
from penstock.checkpoint.lineage import Lineage
from penstock.checkpoint.manifest import Damaged, Manifest
from penstock.checkpoint.parts import chunk_of, read_entry
from penstock.checkpoint.torch_list import LIST
from penstock.checkpoint.weight_files import Source, check_values, open_weights, put
from penstock.checks import check_types
from penstock.comm.collectives import same_everywhere
from penstock.errors import RunError, StageError
from penstock.front.companions import Companions, Pending, by_parameter, under
from penstock.front.mesh import PipelineMesh
from penstock.front.names import StageTensors
from penstock.nest import Value

Pairs = list[tuple[Tensor, Tensor]]
"""Tensors that are to be changed, and the values for each, read and checked."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint in one process.

    model.load_state_dict(penstock.load("run/checkpoint").model)
    """

    model: dict[str, Tensor]  # a plain state dict: every name of the model
    optimizer: dict[str, dict[str, Value]]  # by name of the parameter: the state of the optimizer
    param_groups: list[dict[str, object]] = field(default_factory=list)
    extra: dict[str, Value] = field(default_factory=dict)
    step: int = 0  # training steps that were done


def load(folder: str | Path) -> Checkpoint:
    """All of a checkpoint as plain tensors, in one process.

    model.load_state_dict(penstock.load("run/checkpoint").model)
    """
    check_types("load", RunError, folder=(folder, str | PathLike))
    place = kept.candidates(Path(folder))[0]
    manifest = Manifest.read(place)
    manifest.small(place, LIST)
    Lineage.checked(place, manifest)
    whole = {key: read_entry(place, entry) for key, entry in manifest.tensors.items()}
    model = under("model.", whole)
    for name, others in manifest.aliases.items():
        if name in model:
            model |= dict.fromkeys(others, model[name])
    groups = manifest.optimizer.get("groups", [])
    optimizer: dict[str, dict[str, Value]] = {name: {} for group in groups for name in group["names"]}
    optimizer |= by_parameter(whole)
    for name, values in manifest.optimizer.get("values", {}).items():
        optimizer.setdefault(name, {}).update(values)
    return Checkpoint(model, optimizer, groups, dict(manifest.extra), manifest.step)


def load_into(
    folder: str | Path, tensors: StageTensors, ends: PipelineMesh, companions: Companions, *, or_older: bool
) -> tuple[Manifest, Lineage]:
    """Every rank calls it. What was loaded comes back; if anything is wrong on one rank, all raise and nothing has changed.

    The folder is that of the first rank, and what is wrong with it is told to all.
    """

    def look() -> str:
        check_types("load", RunError, folder=(folder, str | PathLike))
        return json.dumps([[*map(str, paths)] for paths in kept.lines(Path(folder))])

    line, others = json.loads(ends.ranks.broadcast("the checkpoints there are", look))
    for place, next_one in zip(line, [*line[1:], None], strict=True):
        try:
            return _load_one(Path(place), tensors, ends, companions)
        except Damaged as error:
            if not or_older or next_one is None:
                raise Damaged(f"{error}{_hint(next_one, others)}. Nothing was changed") from error
            if ends.is_first:
                warnings.warn(f"{error}; trying the older checkpoint {next_one}", stacklevel=4)
    raise AssertionError("there is at least one candidate")


def _hint(older: str | None, others: list[str]) -> str:
    if older is not None:
        return f". There is an older one, {older}: give or_older=True to go on from it"
    if others:
        return f". Others beside it are of other lines, {', '.join(others)}: give the name of one to go on from it"
    return ""


def _load_one(
    place: Path, tensors: StageTensors, ends: PipelineMesh, companions: Companions
) -> tuple[Manifest, Lineage]:
    # All of it, before anything is changed.
    read: list[tuple[Manifest, Lineage, Pairs, list[Pending], dict[str, Value]]] = []
    before: dict[str, Value] = {}

    def look() -> dict[str, object]:
        manifest = Manifest.read(place)
        if ends.is_first:
            manifest.small(place, LIST)  # nothing is read from it, but who changed it may have changed more
        found, pending = _saved_tensors(place, tensors, manifest), companions.staged(tensors, manifest, place)
        lineage = Lineage.checked(place, manifest)
        read.append((manifest, lineage, found, pending, companions.saved(place, manifest, ends)))
        return {"step": manifest.step, "digest": manifest.digest[:16]}

    everyone = dict(enumerate(ends.ranks.try_all(f"reading the checkpoint {place}", look)))
    same_everywhere(f"the checkpoints in {place}", everyone, "Let all see the same folder. Nothing was changed")
    manifest, lineage, found, pending, states = read[0]
    try:
        ends.ranks.together(f"the states in the checkpoint {place}", lambda: companions.apply(states, place, before))
    except Exception:
        companions.undo(before)
        raise
    _change(tensors, found)
    companions.fill(tensors, manifest.optimizer, pending)
    return manifest, lineage


def _saved_tensors(place: Path, tensors: StageTensors, manifest: Manifest) -> Pairs:
    found, known = [], under("model.", manifest.tensors)
    for name, value in tensors.found_in(known, f"{place} lacks tensors of this model"):
        entry, chunk = known[name], chunk_of(value.detach())
        if entry.shape != tuple(value.shape):
            raise StageError(f"{name} is {list(entry.shape)} in {place} and {list(value.shape)} in the model")
        if chunk is not None:
            found.append((chunk[1], read_entry(place, entry, start=chunk[0], shape=tuple(chunk[1].shape))))
    return found


@torch.no_grad()
def _change(tensors: StageTensors, pairs: Pairs) -> None:
    for target, values in pairs:
        put(target, values)
    tensors.level()


def copy_state(tensors: StageTensors, state: Mapping[str, Tensor], *, strict: bool) -> None:
    """From a state dict in memory, by any name of each tensor; nothing is changed if something does not fit."""
    _change(tensors, _given_tensors(tensors, state, strict=strict))


def take_weights(tensors: StageTensors, ends: PipelineMesh, source: Source) -> None:
    """Values for stages made by hand. All ranks read and check theirs before one changes anything."""
    read = partial(_given_tensors, tensors, strict=True)
    _change(tensors, ends.ranks.together("the weights of the stages", lambda: read(open_weights(source))))


def _given_tensors(tensors: StageTensors, state: Mapping[str, Tensor], *, strict: bool) -> Pairs:
    if not isinstance(state, Mapping):
        raise StageError(f"the state dict is a {type(state).__name__}; expected a mapping from names to tensors")
    found = []
    for key, value in tensors.found_in(state, "the state dict lacks tensors of this rank's stages" if strict else None):
        given = state[key]
        check_values(key, given)
        if given.shape != value.shape:
            raise StageError(f"{key} is {list(given.shape)} in the state dict and {list(value.shape)} in the model")
        chunk = chunk_of(value.detach())
        if hasattr(given, "placements"):
            found.append((value.detach(), given))
        elif chunk is not None:
            start, local = chunk
            found.append((local, given[tuple(slice(a, a + n) for a, n in zip(start, local.shape, strict=True))]))
    return found
