"""The tensors of this rank's stages, under the names that they have in the user's model.

A parameter that several names or several stages share has one name here: the first of its names in the alphabet, so
that a checkpoint does not depend on where the model was cut.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor, nn

from penstock.capture import StageModule
from penstock.errors import StageError
from penstock.front.choice import Built
from penstock.front.mesh import PipelineMesh
from penstock.parallel import unwrap
from penstock.run.ties import Holders
from penstock.stage.pipeline_stage import PipelineStage


@dataclass
class StageTensors:
    """What the stages of this rank hold, by name."""

    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)  # those that a state dict has
    elsewhere: set[str] = field(default_factory=set)  # held here too, and counted on another rank
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)  # other names of the same tensor
    # What two stages of this rank share and each shards for itself: (name, the name there, its copy).
    copies: list[tuple[str, str, nn.Parameter]] = field(default_factory=list)

    @property
    def state(self) -> dict[str, Tensor]:
        return {**self.parameters, **self.buffers}

    def all_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Everything that an optimizer of this rank must move."""
        return chain(self.parameters.items(), ((own, parameter) for _, own, parameter in self.copies))

    def level(self) -> None:
        """Give the copies the value of what they are copies of."""
        with torch.no_grad():
            for name, _, parameter in self.copies:
                parameter.copy_(self.parameters[name])

    def spellings(self, name: str) -> tuple[str, ...]:
        """All names of a tensor."""
        return name, *self.aliases.get(name, ())

    def found_in(self, known: Collection[str], lacks: str | None = None) -> list[tuple[str, Tensor]]:
        """Each tensor with the first of its names that is known. If one has none, an error with the text `lacks` is raised."""
        keys = [(next((one for one in self.spellings(name) if one in known), None), name) for name in self.state]
        missing = [name for key, name in keys if key is None]
        if missing and lacks is not None:
            listed = ", ".join(sorted(missing)[:6]) + (" ..." if len(missing) > 6 else "")
            raise StageError(f"{lacks}: {listed}; this model has {', '.join(sorted(known)[:6])} ...")
        state = self.state
        return [(key, state[name]) for key, name in keys if key is not None]

    def counted(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each parameter of the model, on one rank only."""
        return ((name, p) for name, p in self.parameters.items() if name not in self.elsewhere)


def stage_tensors(
    built: Built, ends: PipelineMesh, ties: Iterable[Holders], prefixes: Mapping[int, str]
) -> StageTensors:
    """Name everything that the stages of this rank hold; `prefixes_of` has told what stands before the names of each stage."""
    stages, rank_of = built.stages, built.plan.placement.ranks
    tied = _by_holder(ties)
    found = StageTensors()
    for stage in stages:
        module = unwrap(stage.submod)
        kept = module.state_dict(keep_vars=True)
        known = module.aliases if isinstance(module, StageModule) else {}
        every = {**dict(module.named_parameters(remove_duplicate=False)), **kept}
        held = {own: tensor for own, tensor in every.items() if isinstance(tensor, Tensor)}
        together: dict[int, list[str]] = {}  # a module may know one tensor by several names
        for own, tensor in held.items():
            together.setdefault(id(tensor), []).append(own)
        for own, tensor in held.items():
            names = together[id(tensor)]
            holders = next((tied[stage.stage_index, n] for n in names if (stage.stage_index, n) in tied), ())
            places = {*holders, *((stage.stage_index, n) for n in names)}
            spellings = {prefixes.get(index, "") + n for index, n in places}
            if not prefixes:
                spellings.update(*(known.get(n, ()) for n in names))
            name = next((known[n][0] for n in names if n in known), min(spellings))
            if len(spellings) > 1:
                found.aliases[name] = tuple(sorted(spellings - {name}))
            if isinstance(tensor, nn.Parameter):
                known_one = found.parameters.setdefault(name, tensor)
                if known_one is not tensor and all(tensor is not copy for _, _, copy in found.copies):
                    found.copies.append((name, own, tensor))
                if holders and rank_of[holders[0][0]] != ends.rank:
                    found.elsewhere.add(name)
            elif own in kept:
                found.buffers.setdefault(name, tensor)
    return found


def prefixes_of(stages: Sequence[PipelineStage], ends: PipelineMesh, ties: Iterable[Holders]) -> dict[int, str]:
    """Stages made by hand may use the same names for different things; then its number tells them apart. All ranks call it."""
    if all(isinstance(unwrap(stage.submod), StageModule) for stage in stages):
        return {}
    tied = _by_holder(ties)
    mine = {stage.stage_index: list(unwrap(stage.submod).state_dict()) for stage in stages}
    told = ends.own.all_gather("the names of the parameters", list(mine.items()))
    everyone: dict[int, list[str]] = dict(chain.from_iterable(told))
    seen: dict[str, int] = {}
    for index, listed in sorted(everyone.items()):
        for name in listed:
            other = seen.setdefault(name, index)
            if other != index and (index, name) not in tied.get((other, name), ()):
                return {index: f"stages.{index}." for index in everyone}
    return {}


def _by_holder(ties: Iterable[Holders]) -> dict[tuple[int, str], Holders]:
    return {holder: tuple(holders) for holders in ties for holder in holders}
