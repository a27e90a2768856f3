"""What goes with a model through a checkpoint: optimizer, scheduler, scaler, data, and the random state of each rank."""

from __future__ import annotations

import copy
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from penstock.checkpoint.lineage import Lineage
from penstock.checkpoint.manifest import Damaged, Entry, Manifest
from penstock.checkpoint.parts import chunk_of, read_entry
from penstock.checkpoint.plain import decode, encode
from penstock.dtypes import dtype_named
from penstock.errors import RunError, StageError
from penstock.front.mesh import PipelineMesh
from penstock.front.names import StageTensors
from penstock.nest import Value

_NOT_OPTIONS = ("params", "param_names")  # of a group
# What torch's schedulers put into a group when they are made: one made anew for a checkpoint without scheduler= needs it.
_OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
Kept = TypeVar("Kept")
Pending = tuple[str, str, Tensor]  # the parameter, the entry of its state, the value


@dataclass(frozen=True)
class Companions:
    """What goes with the model. All but the random numbers may be missing."""

    random: RandomNumbers
    optimizer: Optimizer | None = None
    scheduler: Value = None  # of the learning rate; like the others, anything with state_dict() and load_state_dict()
    data: Value = None  # a data loader that knows its position
    scaler: Value = None
    step: int = 0  # training steps that were done
    extra: Mapping[str, object] = field(default_factory=dict)  # the user's
    lineage: Lineage = field(default_factory=Lineage.new)  # of the last checkpoint of this run

    def parts(self) -> Iterator[tuple[str, Stateful]]:
        """Those whose state is small, and each rank's own."""
        found = {"scheduler": self.scheduler, "data": self.data, "scaler": self.scaler, "random": self.random}
        for name, one in found.items():
            if one is not None and not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                raise StageError(
                    f"{name} is a {type(one).__name__}; expected something with state_dict() and load_state_dict(). What is "
                    f"plain numbers and texts goes into extra={{{name!r}: ...}}"
                )
            if one is not None:
                yield name, one

    def dumps(self) -> bytes:
        """The states of this rank."""
        try:
            return json.dumps({name: encode(one.state_dict()) for name, one in self.parts()}).encode()
        except RecursionError as error:
            raise RunError("the state of a scheduler or of the data contains itself, and cannot be saved") from error

    def saved(self, place: Path, manifest: Manifest, ends: PipelineMesh) -> dict[str, object]:
        """The states that this rank saved; if there were other ranks then, those of the first, without its random numbers."""
        same = (manifest.ranks, manifest.replicas) == (ends.num_ranks, ends.num_replicas)
        number = ends.number if same else manifest.ranks * ends.replica if manifest.replicas == ends.num_replicas else 0
        name = f"rank-{number}.json"
        found = read_states(manifest.small(place, name), str(place / name))
        for wanted, _ in self.parts():
            if wanted not in found and wanted not in ("scaler", "random"):  # a new one begins anew
                raise StageError(f"{place} was saved without {wanted}=; load it without, and set the {wanted} by hand")
        return {key: value for key, value in found.items() if same or key != "random"}

    def staged(self, tensors: StageTensors, manifest: Manifest, place: Path) -> list[Pending]:
        """The tensors of the optimizer that the checkpoint has, read; nothing is changed yet."""
        optimizer = self.optimizer
        if optimizer is None:
            return []
        kind = type(optimizer).__name__
        if manifest.optimizer.get("kind") != kind:
            saved = manifest.optimizer.get("kind")
            raise StageError(
                f"{place} {f'has the state of {saved}' if saved else 'was saved without an optimizer'}, and optimizer is "
                f"{kind}; give one of that kind, or load without optimizer="
            )
        _check_groups(optimizer, manifest.optimizer["groups"], place)
        of_parameter = by_parameter(manifest.tensors)
        options = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        found = []
        for name, parameter in tensors.parameters.items():
            for spelling in tensors.spellings(name):
                for part, entry in of_parameter.get(spelling, {}).items():
                    found.append((name, part, _value(parameter, entry, place, options.get(id(parameter), {}))))
        return found

    def fill(self, tensors: StageTensors, saved: Mapping[str, Value], pending: list[Pending]) -> None:
        """Put what was read into the optimizer; what it has beyond that goes: it was not there when this was saved."""
        optimizer = self.optimizer
        if optimizer is None:
            return
        read: dict[str, dict[str, Value]] = {}
        for name, part, value in pending:
            read.setdefault(name, {})[part] = value
        for name in tensors.parameters:
            for spelling in tensors.spellings(name):
                read.setdefault(name, {}).update(saved["values"].get(spelling, {}))
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        copies = ((one, parameter) for one, _, parameter in tensors.copies)
        for name, parameter in chain(tensors.parameters.items(), copies):
            if id(parameter) in held:
                optimizer.state.pop(parameter, None)
                if read[name]:
                    optimizer.state[parameter] = {part: copy.deepcopy(value) for part, value in read[name].items()}
        for group, options in zip(optimizer.param_groups, (one["options"] for one in saved["groups"]), strict=False):
            for key in group.keys() - options.keys() - optimizer.defaults.keys() - {*_NOT_OPTIONS, *_OF_SCHEDULERS}:
                del group[key]
            for key, value in options.items():
                kept = group.get(key)
                if isinstance(kept, Tensor):
                    kept.fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(kept, tuple) and value is not None else value

    def apply(self, states: dict[str, Value], source: object, before: dict[str, Value]) -> None:
        """Give each its state; what it had goes into `before`, for `undo` if one refuses, here or on another rank."""
        try:
            for name, one in self.parts():
                if name in states:
                    before[name] = copy.deepcopy(one.state_dict())
                    one.load_state_dict(states[name])
        except Exception as error:
            kind = Damaged if name == "random" else RunError  # what the others take is for their authors to say
            raise kind(f"{name} does not take the state saved in {source}: {type(error).__name__}: {error}") from error

    def undo(self, before: dict[str, Value]) -> None:
        for name, one in self.parts():
            if name in before:
                one.load_state_dict(before[name])


def read_states(data: bytes, source: str) -> dict[str, object]:
    """What `dumps` wrote."""
    try:
        found = decode(json.loads(data))
        if not isinstance(found, dict):
            raise ValueError("no object")
        return found
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{source} cannot be read: {error}") from error


@dataclass(frozen=True)
class RandomNumbers:
    """The random numbers of this rank: torch's, Python's, numpy's if it is in use, and the device's if it is an accelerator."""

    device: torch.device

    def state_dict(self) -> dict[str, object]:
        return {name: state() for name, (state, _) in self._sources().items()}

    def load_state_dict(self, state: Mapping[str, Value], /) -> None:
        for name, (_, set_state) in self._sources().items():
            if name in state or name in ("torch", "python"):
                set_state(state[name])

    def _sources(self) -> dict[str, tuple[Callable[[], object], Callable[[Value], object]]]:
        found: dict[str, tuple[Callable[[], object], Callable[[Value], object]]] = {
            "torch": (torch.get_rng_state, torch.set_rng_state),
            "python": (random.getstate, random.setstate),
        }
        if "numpy" in sys.modules:
            numpy = sys.modules["numpy"].random
            found["numpy"] = numpy.get_state, numpy.set_state
        if self.device.type != "cpu":
            module = torch.get_device_module(self.device)
            found[self.device.type] = (
                lambda: module.get_rng_state(self.device),
                lambda state: module.set_rng_state(state, self.device),
            )
        return found


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """What is drawn inside is not missing afterwards."""
    numbers = RandomNumbers(device)
    before = numbers.state_dict()
    try:
        yield
    finally:
        numbers.load_state_dict(before)


# -- the optimizer, by the names of the parameters


def under(prefix: str, entries: Mapping[str, Kept]) -> dict[str, Kept]:
    """The entries whose keys begin so, without that."""
    return {key.removeprefix(prefix): entry for key, entry in entries.items() if key.startswith(prefix)}


def by_parameter(entries: Mapping[str, Kept]) -> dict[str, dict[str, Kept]]:
    """Of all that a checkpoint holds the state of the optimizer, by the name of the parameter."""
    found: dict[str, dict[str, Kept]] = {}
    for key, entry in under("optimizer.state.", entries).items():
        name, _, part = key.rpartition(".")
        found.setdefault(name, {})[part] = entry
    return found


def optimizer_parts(optimizer: Optimizer | None, tensors: StageTensors) -> tuple[dict[str, Tensor], dict[str, Value]]:
    """The tensors of an optimizer by their keys in a checkpoint; its kind, its plain values by name, and its groups."""
    if optimizer is None:
        return {}, {}
    names = {id(p): name for name, p in tensors.parameters.items()}
    copies = {id(p) for _, _, p in tensors.copies}
    state: dict[str, Tensor] = {}
    values: dict[str, dict[str, object]] = {}
    for parameter, entries in optimizer.state.items():
        if id(parameter) not in names.keys() | copies:
            raise StageError(
                "the optimizer holds a parameter that is not of this pipeline; make it from pipe.parameters()"
            )
        name = names.get(id(parameter), "")
        for key, value in entries.items() if name and name not in tensors.elsewhere else ():
            if isinstance(value, Tensor):
                state[f"optimizer.state.{name}.{key}"] = value.detach()
            else:
                values.setdefault(name, {})[key] = value
    groups = []
    for group in optimizer.param_groups:
        plain = {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k not in _NOT_OPTIONS}
        groups.append({"options": plain, "names": [names[id(p)] for p in group["params"] if id(p) in names]})
    return state, {"kind": type(optimizer).__name__, "values": values, "groups": groups}


def _check_groups(optimizer: Optimizer, saved: list[dict[str, Value]], place: Path) -> None:
    """Whether `fill` can set the options of every group: a later error would leave half of a checkpoint."""
    own = optimizer.param_groups
    if len(own) > len(saved):
        raise StageError(
            f"{place} has {len(saved)} groups of parameters and the optimizer {len(own)}; make as many, or load without it"
        )
    for number, (group, one) in enumerate(zip(own, saved, strict=False)):
        for key, value in one["options"].items():
            kept = group.get(key)
            is_number = isinstance(kept, int | float | Tensor)
            kind: Value = int | float if is_number else list if isinstance(kept, tuple) else object
            fits = isinstance(value, kind) or (value is None and not isinstance(kept, Tensor))
            if key in _NOT_OPTIONS or not fits:
                raise StageError(
                    f"{place} has {key}={value!r:.80} for group {number} of the optimizer, which has {kept!r:.80}"
                )


def _value(parameter: Tensor, entry: Entry, place: Path, options: Mapping[str, object]) -> Tensor:
    """As the parameter is spread, where it has its shape; else whole, on the host unless the optimizer runs on a device."""
    if entry.shape != tuple(parameter.shape):
        whole = read_entry(place, entry)
        return whole.to(parameter.device) if options.get("capturable") or options.get("fused") else whole
    made = torch.empty_like(parameter.detach(), dtype=dtype_named(entry.dtype))
    chunk = chunk_of(made)
    if chunk is not None:
        start, local = chunk
        local.copy_(read_entry(place, entry, start=start, shape=tuple(local.shape)))
    return made
