"""The state of an optimizer by the names of the parameters: what a checkpoint holds of it, and back into another one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.checkpoint.manifest import Entry, Manifest
from penstock.checkpoint.parts import chunk_of, read_entry
from penstock.dtypes import dtype_named
from penstock.errors import StageError
from penstock.front.names import StageTensors
from penstock.nest import Value

_NOT_OPTIONS = ("params", "param_names")  # of a group
Kept = TypeVar("Kept")
Pending = tuple[str, str, Tensor]  # the parameter, the entry of its state, the value


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


def parts(
    optimizer: Optimizer | None, tensors: StageTensors
) -> tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, object]], list[dict[str, Value]]]:
    """The optimizer's tensors by name, its plain values by name, and its groups."""
    if optimizer is None:
        return {}, {}, []
    names = {id(p): name for name, p in tensors.parameters.items()}
    copies = {id(p) for _, _, p in tensors.copies}
    state: dict[str, dict[str, Tensor]] = {}
    values: dict[str, dict[str, object]] = {}
    for parameter, entries in optimizer.state.items():
        if id(parameter) in copies:
            continue
        name = names.get(id(parameter))
        if name is None:
            raise StageError(
                "the optimizer holds a parameter that is not of this pipeline; make it from pipe.parameters()"
            )
        if name in tensors.elsewhere:
            continue
        for key, value in entries.items():
            if isinstance(value, Tensor):
                state.setdefault(name, {})[key] = value.detach()
            else:
                values.setdefault(name, {})[key] = value
    groups = []
    for group in optimizer.param_groups:
        plain = {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k not in _NOT_OPTIONS}
        groups.append({"options": plain, "names": [names[id(p)] for p in group["params"] if id(p) in names]})
    return state, values, groups


def staged(optimizer: Optimizer | None, tensors: StageTensors, manifest: Manifest, place: Path) -> list[Pending]:
    """The tensors of the optimizer that the checkpoint has, read; nothing is changed yet."""
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
            fits = (
                isinstance(value, int | float)
                if isinstance(kept, int | float | Tensor)
                else isinstance(value, list) or not isinstance(kept, tuple)
            )
            if key in _NOT_OPTIONS or not (fits or (value is None and not isinstance(kept, Tensor))):
                raise StageError(
                    f"{place} has {key}={value!r:.80} for group {number} of the optimizer, which has {kept!r:.80}"
                )


def _value(parameter: Tensor, entry: Entry, place: Path, options: Mapping[str, object]) -> Tensor:
    """As the parameter is spread, where it has its shape; else whole, on the host unless the optimizer runs on a device."""
    if entry.shape != tuple(parameter.shape):
        whole = read_entry(place, entry, start=(0,) * len(entry.shape), shape=entry.shape)
        return whole.to(parameter.device) if options.get("capturable") or options.get("fused") else whole
    made = torch.empty_like(parameter.detach(), dtype=dtype_named(entry.dtype))
    chunk = chunk_of(made)
    if chunk is not None:
        start, local = chunk
        local.copy_(read_entry(place, entry, start=start, shape=tuple(local.shape)))
    return made


def fill(optimizer: Optimizer, tensors: StageTensors, saved: Mapping[str, Value], pending: list[Pending]) -> None:
    """Put what was read into the optimizer."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, part, value in pending:
        for parameter in (tensors.parameters[name], *(copy for one, _, copy in tensors.copies if one == name)):
            if id(parameter) in held:
                optimizer.state[parameter][part] = value.clone()
    for name, values in saved["values"].items():
        own = tensors.parameters.get(name)
        if own is not None and id(own) in held:
            optimizer.state[own].update(values)
    for group, options in zip(optimizer.param_groups, (one["options"] for one in saved["groups"]), strict=False):
        for key, value in options.items():
            kept = group.get(key)
            if isinstance(kept, Tensor):
                kept.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(kept, tuple) and value is not None else value
