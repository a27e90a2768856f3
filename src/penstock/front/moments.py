"""The state of an optimizer by the names of the parameters: what a checkpoint holds of it, and back into another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from penstock.errors import StageError
from penstock.front.names import StageTensors

Pending = tuple[str, str, str, Tensor]  # the key in the file, the parameter, the entry, the tensor to read into


def parts(
    optimizer: Any, tensors: StageTensors
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any], list[dict[str, Any]]]:
    """The optimizer's tensors by name, its plain values by name, and its groups."""
    if optimizer is None:
        return {}, {}, []
    names = {id(p): name for name, p in tensors.parameters.items()}
    copies = {id(p) for _, _, p in tensors.copies}
    state: dict[str, dict[str, Tensor]] = {}
    values: dict[str, Any] = {}
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
                values[f"{name}.{key}"] = value
    groups = []
    for group in optimizer.param_groups:
        plain = {
            k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k not in ("params", "param_names")
        }
        groups.append({"options": plain, "names": [names[id(p)] for p in group["params"] if id(p) in names]})
    return state, values, groups


def targets(optimizer: Any, tensors: StageTensors, entries: Mapping[str, TensorStorageMetadata]) -> list[Pending]:
    """Room for each tensor of the optimizer that the checkpoint has."""
    if optimizer is None:
        return []
    of_parameter: dict[str, list[tuple[str, TensorStorageMetadata]]] = {}
    for key, entry in entries.items():
        name, _, part = key.removeprefix("optimizer.state.").rpartition(".")
        if key.startswith("optimizer.state."):
            of_parameter.setdefault(name, []).append((part, entry))
    found = []
    for name, parameter in tensors.parameters.items():
        for spelling in (name, *tensors.aliases.get(name, ())):
            for part, entry in of_parameter.get(spelling, ()):
                same = tuple(entry.size) == tuple(parameter.shape)
                made = torch.empty_like(parameter.detach(), dtype=entry.properties.dtype) if same else room(entry)
                found.append((f"optimizer.state.{spelling}.{part}", name, part, made))
    return found


def room(entry: TensorStorageMetadata) -> Tensor:
    """A plain tensor of that size and type."""
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def fill(
    optimizer: Any, tensors: StageTensors, facts: Mapping[str, Any], pending: list[tuple[str, str, str, Tensor]]
) -> None:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for _, name, part, value in pending:
        for parameter in (tensors.parameters[name], *(copy for one, _, copy in tensors.copies if one == name)):
            if id(parameter) in held:
                optimizer.state[parameter][part] = value.clone()
    for key, value in facts["optimizer_values"].items():
        name, _, part = key.rpartition(".")
        own = tensors.parameters.get(name)
        if own is not None and id(own) in held:
            optimizer.state[own][part] = value
    for group, saved in zip(optimizer.param_groups, facts["param_groups"], strict=False):
        for key, value in saved["options"].items():
            if key in group:
                kept = group[key]
                group[key] = (
                    tuple(value)
                    if isinstance(kept, tuple)
                    else kept.fill_(value)
                    if isinstance(kept, Tensor)
                    else value
                )
