"""The names of parameters and buffers, and which of them are one tensor under several names.

names = StateNames.of(model)
names.groups["wte.weight"]                       # ("wte.weight", "lm_head.weight"): tied
names.name_for("wte.weight", "lm_head")          # "lm_head.weight": the name where it is used
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn


@dataclass(frozen=True)
class Shared:
    """One parameter or buffer that several stages use, each under a name of the user's model.

    pipe.info().shared["embed.weight"].holders  # ((0, "embed.weight"), (3, "head.weight"))
    """

    owner: int  # the stage whose copy counts: in a norm, in a checkpoint
    name: str  # its name there
    holders: tuple[tuple[int, str], ...]  # every (stage, name), the owner first
    is_parameter: bool = True  # False for a buffer, which has no gradient


class StateNames(NamedTuple):
    """Every name of the user's model: ``first`` maps it to the first name of the same tensor."""

    first: dict[str, str]
    groups: dict[str, tuple[str, ...]]  # first name -> all names, in the model's order
    parameters: frozenset[str]  # names of parameters; all others are buffers
    transient: frozenset[str]  # names of buffers that state_dict leaves out

    @staticmethod
    def of(model: nn.Module) -> StateNames:
        leaders: dict[int, str] = {}
        first = {name: leaders.setdefault(id(value), name) for name, value in named_state(model).items()}
        groups: dict[str, list[str]] = {}
        for name, leader in first.items():
            groups.setdefault(leader, []).append(name)
        parameters = frozenset(n for n, _ in model.named_parameters(remove_duplicate=False))
        return StateNames(first, {k: tuple(v) for k, v in groups.items()}, parameters, transient_names(model))

    def name_for(self, name: str, path: str) -> str:
        """Of all names of a tensor, the one that belongs to the module at `path`, if there is one."""
        names = self.groups[self.first[name]]
        own = [candidate for candidate in names if candidate.rpartition(".")[0] == path]
        return (own or [c for c in names if not path or c.startswith(f"{path}.")] or names)[0]


def named_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers, under every name that they have."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def transient_names(model: nn.Module) -> frozenset[str]:
    """The names of buffers that state_dict leaves out."""
    return frozenset(
        f"{prefix}.{name}".removeprefix(".")
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    )


def owner_of(root: nn.Module, name: str, *, make: bool = False) -> tuple[nn.Module, str]:
    """The submodule that holds what a model has under a name, and the last part of that name. With `make`, submodules that are
    not there are made. They are not looked up as attributes: a stage has some of the same names."""
    *path, leaf = name.split(".")
    for part in path:
        if make and part not in root._modules:
            root._modules[part] = nn.Module()
        root = root._modules.get(part) or nn.Module()
    return root, leaf


def assign(names: StateNames, used: Sequence[Sequence[str]]) -> list[list[str]]:
    """The names that each stage holds, in the order of the model."""
    held = [set(stage) for stage in used]
    home = {name: k for k, stage in reversed([*enumerate(used)]) for name in stage}  # the first stage that uses it
    tensors = {names.first[name]: k for name, k in sorted(home.items(), key=lambda item: -item[1])}
    for name in names.first.keys() - home.keys():
        held[tensors[names.first[name]] if names.first[name] in tensors else _nearest(name, home)].add(name)
    return [[name for name in names.first if name in stage] for stage in held]


def _nearest(name: str, home: dict[str, int]) -> int:
    """The stage of the used name that shares the longest path with `name`; the first stage if there is none."""
    while "." in name:
        name = name.rpartition(".")[0]
        if stages := [k for other, k in home.items() if other.startswith(f"{name}.")]:
            return min(stages)
    return 0


def find_shared(names: StateNames, held: Sequence[Sequence[str]]) -> dict[str, Shared]:
    """Parameters and buffers that several stages hold."""
    holders: dict[str, dict[int, str]] = {}
    for k, stage in enumerate(held):
        for name in stage:
            holders.setdefault(names.first[name], {}).setdefault(k, name)
    return {
        leader: Shared(min(found), found[min(found)], tuple(sorted(found.items())), leader in names.parameters)
        for leader, found in holders.items()
        if len(found) > 1
    }
