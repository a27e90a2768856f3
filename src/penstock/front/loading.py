"""Reading a checkpoint: all ranks read and check what they need, agree on what it is, and only then change anything.

extra = pipe.load("run/checkpoint", optimizer=optimizer)             # with any other number of ranks and stages
model.load_state_dict(penstock.load("run/checkpoint").model)         # the plain model, in one process
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from penstock.checkpoint import kept
from penstock.checkpoint.manifest import Damaged, Manifest
from penstock.checkpoint.parts import chunk_of, read_entry
from penstock.checkpoint.torch_list import LIST
from penstock.checkpoint.weight_files import Source, check_values, open_weights, put
from penstock.errors import RanksDisagree, RunError, StageError
from penstock.front import moments
from penstock.front.companions import Companions, check_random_state, read_states, set_random_state
from penstock.front.ends import Ends
from penstock.front.names import StageTensors
from penstock.misfits import takes
from penstock.nest import Value


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


@takes(RunError)
def load(folder: str | Path) -> Checkpoint:
    """All of a checkpoint as plain tensors, in one process.

    model.load_state_dict(penstock.load("run/checkpoint").model)
    """
    place = kept.candidates(Path(folder))[0]
    manifest = Manifest.read(place)
    manifest.small(place, LIST)
    whole = {
        key: read_entry(place, entry, start=(0,) * len(entry.shape), shape=entry.shape)
        for key, entry in manifest.tensors.items()
    }
    model = moments.under("model.", whole)
    for name, others in manifest.aliases.items():
        if name in model:
            model |= dict.fromkeys(others, model[name])
    groups = manifest.optimizer.get("groups", [])
    optimizer: dict[str, dict[str, Value]] = {name: {} for group in groups for name in group["names"]}
    optimizer |= moments.by_parameter(whole)
    for name, values in manifest.optimizer.get("values", {}).items():
        optimizer.setdefault(name, {}).update(values)
    return Checkpoint(model, optimizer, groups, dict(manifest.extra), manifest.step)


@dataclass(frozen=True)
class Staged:
    """All that this rank needs of a checkpoint, read and checked; nothing is changed yet."""

    manifest: Manifest
    tensors: list[tuple[Tensor, Tensor]]  # what is to be changed, and the values
    moments: list[moments.Pending]
    states: dict[str, Value]


def load_into(
    folder: str | Path, tensors: StageTensors, ends: Ends, companions: Companions, *, or_older: bool
) -> Manifest:
    """Every rank calls it. What was loaded comes back; if anything is wrong on one rank, all raise and nothing has changed."""
    there = ends.decide(
        "the checkpoints that there are", lambda: json.dumps([str(p) for p in kept.candidates(Path(folder))])
    )
    places = [Path(path) for path in json.loads(there)]
    for place, next_one in zip(places, [*places[1:], None], strict=True):
        try:
            return _load_one(place, tensors, ends, companions)
        except Damaged as error:
            if not or_older or next_one is None:
                hint = f". There is an older one, {next_one}: give or_older=True to go on from it" if next_one else ""
                raise Damaged(f"{error}{hint}. Nothing was changed") from error
            if ends.is_first:
                warnings.warn(f"{error}; trying the older checkpoint {next_one}", stacklevel=4)
    raise AssertionError("there is at least one candidate")


def _load_one(place: Path, tensors: StageTensors, ends: Ends, companions: Companions) -> Manifest:
    staged: list[Staged] = []
    before: list[dict[str, object]] = []

    def read() -> list[object]:
        staged.append(_stage(place, tensors, ends, companions))
        return [staged[0].manifest.digest, staged[0].manifest.step]

    def give() -> None:
        before.append(companions.apply(staged[0].states))

    answers = ends.agree(f"reading the checkpoint {place}", read)
    if any(answer != answers[0] for answer in answers):
        rows = "\n".join(
            f"  rank {number}: step {step}, digest {digest[:16]}" for number, (digest, step) in enumerate(answers)
        )
        raise RanksDisagree(
            f"the ranks found different checkpoints in {place}:\n{rows}\nLet all of them see the same folder. Nothing was changed"
        )
    try:
        ends.agree(f"the states in the checkpoint {place}", give)
    except Exception:
        for states in before:
            companions.undo(states)
        raise
    _change(staged[0], tensors, ends, companions)
    return staged[0].manifest


def _stage(place: Path, tensors: StageTensors, ends: Ends, companions: Companions) -> Staged:
    manifest = Manifest.read(place)
    if ends.is_first:
        manifest.small(place, LIST)  # nothing is read from it, but who changed it may have changed more
    found, known = [], moments.under("model.", manifest.tensors)
    for name, value in tensors.found_in(known, f"{place} lacks tensors of this model"):
        entry, chunk = known[name], chunk_of(value.detach())
        if entry.shape != tuple(value.shape):
            raise StageError(f"{name} is {list(entry.shape)} in {place} and {list(value.shape)} in the model")
        if chunk is not None:
            found.append((chunk[1], read_entry(place, entry, start=chunk[0], shape=tuple(chunk[1].shape))))
    pending = moments.staged(companions.optimizer, tensors, manifest, place)
    return Staged(manifest, found, pending, _states(place, manifest, ends, companions))


def _states(place: Path, manifest: Manifest, ends: Ends, companions: Companions) -> dict[str, object]:
    """The states that this rank saved; if there were other ranks then, those of the first, without its random numbers."""
    same = (manifest.ranks, manifest.replicas) == (ends.num_ranks, ends.num_replicas)
    number = ends.number if same else manifest.ranks * ends.replica if manifest.replicas == ends.num_replicas else 0
    name = f"rank-{number}.json"
    found = read_states(manifest.small(place, name), str(place / name))
    for wanted, _ in companions.parts():
        if wanted not in found and wanted != "scaler":  # a new one begins anew
            raise StageError(f"{place} was saved without {wanted}=; load it without, and set the {wanted} by hand")
    if not same:
        return {key: value for key, value in found.items() if key != "random"}
    if "random" in found:
        check_random_state(found["random"], ends.device, str(place / name))
    return found


def _change(staged: Staged, tensors: StageTensors, ends: Ends, companions: Companions) -> None:
    with torch.no_grad():
        for target, value in staged.tensors:
            put(target, value)
    tensors.level()
    if companions.optimizer is not None:
        moments.fill(companions.optimizer, tensors, staged.manifest.optimizer, staged.moments)
    if "random" in staged.states:
        set_random_state(staged.states["random"], ends.device)


def copy_state(tensors: StageTensors, state: Mapping[str, Tensor], *, strict: bool) -> None:
    """From a state dict in memory, by any name of each tensor; nothing is changed if something does not fit."""
    state_to_copy(tensors, state, strict=strict)()


def take_weights(tensors: StageTensors, ends: Ends, source: Source) -> None:
    """Values for stages made by hand. All ranks read and check theirs before one changes anything."""
    pending: list[Callable[[], None]] = []
    ends.agree(
        "the weights of the stages",
        lambda: pending.append(state_to_copy(tensors, open_weights(source), strict=True)),
    )
    pending[0]()


def state_to_copy(tensors: StageTensors, state: Mapping[str, Tensor], *, strict: bool) -> Callable[[], None]:
    """The same with all that can be wrong found out, and nothing changed: what comes back does that."""
    if not isinstance(state, Mapping):
        raise StageError(f"the state dict is a {type(state).__name__}; expected a mapping from names to tensors")
    found = []
    for key, value in tensors.found_in(state, "the state dict lacks tensors of this rank's stages" if strict else None):
        given = state[key]
        check_values(key, given)
        if given.shape != value.shape:
            raise StageError(f"{key} is {list(given.shape)} in the state dict and {list(value.shape)} in the model")
        found.append((value, given))

    def change() -> None:
        with torch.no_grad():
            for value, given in found:
                chunk = None if hasattr(given, "placements") else chunk_of(value)
                if chunk is None:
                    put(value, given)
                else:
                    start, local = chunk
                    put(local, given[tuple(slice(a, a + n) for a, n in zip(start, local.shape, strict=True))])
        tensors.level()

    return change
