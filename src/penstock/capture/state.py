"""Which stage holds which parameter and buffer.

A stage holds what its graph uses. What no graph uses goes to the stage that holds its neighbours, so that the stages
together hold every name of the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from penstock.capture.info import Shared
from penstock.capture.module import StageModule
from penstock.capture.names import StateNames, named_state


def assign(names: StateNames, used: Sequence[Sequence[str]]) -> list[list[str]]:
    """The names that each stage holds, in the order of the model."""
    held = [set(stage) for stage in used]
    home: dict[str, int] = {}
    for k, stage in enumerate(used):
        for name in stage:
            home.setdefault(name, k)
    used_tensors = {names.first[name]: k for name, k in reversed(home.items())}
    for name in names.first:
        if name in home:
            continue
        known = used_tensors.get(names.first[name])
        held[_nearest(name, home) if known is None else known].add(name)
    return [[name for name in names.first if name in stage] for stage in held]


def _nearest(name: str, home: dict[str, int]) -> int:
    """The stage of the used name that shares the longest path with `name`; the first stage if there is none."""
    path = name.split(".")[:-1]
    while path:
        prefix = ".".join(path) + "."
        stages = [k for other, k in home.items() if other.startswith(prefix)]
        if stages:
            return min(stages)
        path.pop()
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


def give(stages: Sequence[StageModule], model: nn.Module, *, names: StateNames, held: Sequence[Sequence[str]]) -> None:
    """Put the user's own tensors into the stages: nothing is copied, what is shared stays one object."""
    state: dict[str, torch.Tensor] = named_state(model)
    everything = frozenset(names.first)
    for stage, own in zip(stages, held, strict=True):
        stage.model_names = everything
        for name in own:
            stage.add_state(name, state[name], persistent=name not in names.transient)
            others = tuple(n for n in names.groups[names.first[name]] if n != name)
            if others:
                stage.aliases[name] = others
