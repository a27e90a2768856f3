"""Parameters that several stages hold: one logical parameter, the same value everywhere, one summed gradient.

Each rank's part of a step's gradient is kept apart from what `.grad` held before. Only the owner adds to what it held:
data parallelism must average that too, if earlier steps were under `no_sync`. After a step that succeeded on all ranks the
parts go to the owner, which adds them up in the order of ranks and sends the sum back; autograd then gives it to every holder.
So all holders have the same bits, also when gradients accumulate over steps, and equal optimizers keep them equal. A tensor
hook on such a parameter gets each microbatch's part, once. (A post-accumulate hook fires once more, for the sum.)
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from penstock.checks import fits
from penstock.comm.messages import kind_of
from penstock.comm.transport import Transport
from penstock.errors import StageError
from penstock.nest import Value
from penstock.parallel import unwrap
from penstock.plan import Placement
from penstock.run.layout import dense, wire
from penstock.stage.dtensors import layout_of, placed_as, to_local
from penstock.stage.engine import run_engine
from penstock.stage.pipeline_stage import PipelineStage

Holders = Sequence[tuple[int, str]]  # (stage, name of the parameter there), the owner first


class Tied(Protocol):
    """What `penstock.tie` makes: parameters of several stages that are one."""

    @property
    def holders(self) -> Holders: ...


def holders_of(ties: Iterable[Tied | Holders]) -> list[Holders]:
    """The holders of each tie that a user gave, as a `penstock.tie` or as the holders themselves."""
    found: list[Value] = []
    if isinstance(ties, Iterable) and not isinstance(ties, str | Tensor):
        found = [getattr(tie, "holders", tie) for tie in ties]
    else:
        found.append(ties)
    for holders in found:
        if not fits(holders, Sequence[tuple[int, str]]):
            raise StageError(f"ties has {holders!r:.80}; expected [penstock.tie([(0, name), (3, name)]), ...]")
    return found


class _Home(NamedTuple):
    """Where a parameter hangs: its module, and its name there."""

    parameter: nn.Parameter
    module: nn.Module
    name: str

    @classmethod
    def of(cls, stage: PipelineStage, name: str) -> _Home:
        module = unwrap(stage.submod)
        found = dict(module.named_parameters(remove_duplicate=False))
        if name not in found:
            known = ", ".join(list(found)[:8]) or "none"
            raise StageError(f"stage {stage.stage_index} has no parameter {name!r} to tie; it has {known}")
        *path, leaf = name.split(".")
        for part in path:
            module = module._modules[part]  # type: ignore[assignment]  # not by attributes: a stage has some of its own
        return cls(found[name], module, leaf)

    def present(self) -> nn.Parameter:
        """The one that hangs there now: ``load_state_dict(..., assign=True)`` puts others there. One that is of another type is
        the same for the time of a step, gathered by a wrapper."""
        now = self.module._parameters.get(self.name)
        return self.parameter if now is None or type(now) is not type(self.parameter) else now


@dataclass
class _TieGroup:
    """One logical parameter, as seen from this rank."""

    ranks: tuple[int, ...]  # that hold it, the owner's first
    names: list[str]  # of all holders, the owner's first
    homes: list[_Home]  # on this rank
    continues: bool = False  # in a step: whether this rank, the owner's, adds to the gradient of earlier steps

    def __post_init__(self) -> None:
        self.holders = " = ".join(self.names)  # for the ranks to compare
        self.find()

    def find(self) -> None:
        """The copies that this rank holds now; each may hang in several places."""
        self.mine = tuple({id(present): present for present in map(_Home.present, self.homes)}.values())


class _SharedGradient(NamedTuple):
    """A gradient, of one holder or of all, as it is sent."""

    grad: Tensor | None
    frozen: bool = False  # whether a holder has the parameter frozen
    continues: bool = False  # whether the gradient of earlier steps is in it


class Ties:
    """The shared parameters of a schedule's stages. `meet` must be called, on all ranks, before the first step."""

    def __init__(
        self, stages: Sequence[PipelineStage], said: Iterable[Holders], placement: Placement, transport: Transport
    ) -> None:
        self.transport = transport
        routes, by_index = stages[0].routes, {stage.stage_index: stage for stage in stages}
        found = [*said, *(declared(stages) if routes is None else routes.ties)]
        groups = dict.fromkeys(tuple((stage, name) for stage, name in holders) for holders in found)
        self.known: list[_TieGroup] = []  # of all ranks
        for holders in groups:
            ranks = [placement.rank_of(stage) for stage, _ in holders]
            here = [holder for holder, rank in zip(holders, ranks, strict=True) if rank == transport.rank]
            names = [f"{name} of stage {stage}" for stage, name in holders]
            homes = [_Home.of(by_index[stage], name) for stage, name in here]
            self.known.append(_TieGroup(tuple(dict.fromkeys(ranks)), names, homes))
        self.groups: list[_TieGroup] = []  # those in which this rank has a part, once all have met
        self.before: list[tuple[nn.Parameter, Tensor | None]] = []  # in a step: what `.grad` held before it

    @property
    def peers(self) -> set[int]:
        """The ranks with which this one exchanges gradients."""
        mine = self.transport.rank
        ranks = [group.ranks for group in self.known if mine in group.ranks]
        return {one for owner, *others in ranks for one in (others if mine == owner else [owner])}

    def meet(self) -> None:
        """Compare what the ranks hold, and let every holder start from the owner's value."""
        self.groups = []
        if not self.known:
            return
        mine = [[_place(parameter) for parameter in group.mine] for group in self.known]
        everyone = self.transport.collectives.all_gather("tied parameters", mine)
        seen: dict[tuple[int, ...], _TieGroup] = {}  # by rank and place there
        for number, group in enumerate(self.known):
            held = [(rank, tuple(place), kind) for rank in group.ranks for place, kind in everyone[rank][number]]
            if len({kind for _, _, kind in held}) > 1:
                found = [(rank, sorted({kind for there, _, kind in held if there == rank})) for rank in group.ranks]
                differ = ", ".join(f"{' and '.join(kinds)} on rank {rank}" for rank, kinds in found)
                raise StageError(
                    f"the parameters tied to {group.names[0]} differ: {differ}; parameters that are one have one shape and "
                    "one dtype, and are spread over a mesh in one way"
                )
            places = [(rank, *place) for rank, place, _ in held if place[1]]
            if twice := next((place for place in places if places.count(place) > 1), None):
                raise StageError(
                    f"{group.holders} are one parameter, and rank {twice[0]} has two nn.Parameters of one memory for it, which "
                    "an optimizer would change twice; give its stages the same nn.Parameter, or each a copy"
                )
            # Ranks as threads, or stages of one rank, may hold the very same tensor: autograd sums its gradient already.
            if len({place for _, place, _ in held}) < 2:
                continue
            for rank, place, _ in held:
                if place[1] and (other := seen.setdefault((rank, *place), group)) is not group:
                    raise StageError(
                        f"one parameter of rank {rank} is in two ties: {other.holders}, and {group.holders}; its gradient "
                        "would be added up twice. Give one tie with all holders: tie([(0, name), (1, name), ...])"
                    )
            if group.mine:
                self.groups.append(group)
        self._level()

    def _level(self) -> None:
        for group in self.groups:
            owner, *others = group.ranks
            mine = self.transport.rank == owner
            value = group.mine[0].detach() if mine else self._receive(owner, group).grad
            assert value is not None, "an owner has a value"
            for rank in others if mine else ():
                self._send(rank, _SharedGradient(value))
            for parameter in group.mine:
                parameter.data.copy_(value)

    def begin(self) -> None:
        """Keep what `.grad` holds apart from what the step adds; the owner adds to a copy of it."""
        for group in self.groups:
            group.find()
            owns = self.transport.rank == group.ranks[0]
            group.continues = owns and group.mine[0].grad is not None and group.mine[0].requires_grad
            for place, parameter in enumerate(group.mine):
                grad = parameter.grad
                self.before.append((parameter, grad))
                parameter.grad = grad.clone() if grad is not None and group.continues and not place else None

    def restore(self) -> None:
        """After a failure: `.grad` is what it was."""
        for parameter, grad in self.before:
            parameter.grad = grad
        self.before = []

    def finish(self) -> None:
        """After a step that succeeded on all ranks."""
        totals = [self._total(group) for group in self.groups]
        self.restore()
        for group, total in zip(self.groups, totals, strict=True):
            if total.grad is not None and total.frozen:
                here = "" if all(p.requires_grad for p in group.mine) else ", this rank's too"
                raise StageError(
                    f"{group.holders} are one parameter, and a holder has it frozen while another trains it (ranks "
                    f"{sorted(group.ranks)}{here}); call requires_grad_(False) on every rank that holds it, or on none"
                )
        for group, total in zip(self.groups, totals, strict=True):
            if total.grad is None:
                continue
            for parameter in group.mine:
                if total.continues and parameter.grad is not None:
                    parameter.grad.detach().zero_()  # the sum has it
                hooks = parameter._backward_hooks or {}  # they have changed each part of the gradient already
                heard = dict(hooks)
                hooks.clear()
                try:
                    run_engine((parameter,), (total.grad.clone(),))
                finally:
                    hooks.update(heard)

    def _total(self, group: _TieGroup) -> _SharedGradient:
        """The gradient of this step over all holders."""
        found = [(parameter.grad, parameter) for parameter in group.mine if parameter.grad is not None]
        grads = [placed_as(dense(grad), parameter) for grad, parameter in found]
        frozen = not all(parameter.requires_grad for parameter in group.mine)
        owner, *others = group.ranks
        if self.transport.rank != owner:
            self._send(owner, _SharedGradient(_sum(grads), frozen))
            return self._receive(owner, group)
        for rank in others:
            other = self._receive(rank, group)
            grads += [] if other.grad is None else [other.grad]
            frozen = frozen or other.frozen
        total = _SharedGradient(_sum(grads), frozen, group.continues)
        for rank in others:
            self._send(rank, total)
        return total

    def _send(self, rank: int, part: _SharedGradient) -> None:
        flags = torch.tensor([part.grad is not None, part.frozen, part.continues], dtype=torch.int64)
        works = [self.transport.control.isend(flags, rank)]
        if part.grad is not None:
            works.append(self.transport.isend(wire(part.grad), rank))
        for work in works:
            work.wait()

    def _receive(self, rank: int, group: _TieGroup) -> _SharedGradient:
        flags = torch.empty(3, dtype=torch.int64)
        self.transport.control.irecv(flags, rank).wait()
        has_grad, frozen, continues = map(bool, flags.tolist())
        if not has_grad:
            return _SharedGradient(None, frozen, continues)
        grad = torch.empty_like(group.mine[0].detach(), memory_format=torch.contiguous_format)
        self.transport.irecv(to_local(grad), rank).wait()
        return _SharedGradient(grad, frozen, continues)


def _sum(grads: Sequence[Tensor]) -> Tensor | None:
    return reduce(torch.add, grads) if grads else None


def declared(stages: Iterable[PipelineStage]) -> list[Holders]:
    """What the modules of hand-made stages say themselves, in an attribute `ties`, as those of `split_modules` do."""
    said = [getattr(unwrap(stage.submod), "ties", ()) for stage in stages]
    ties = [tie for each in said if isinstance(each, tuple) for tie in each if hasattr(tie, "holders")]
    return list(dict.fromkeys(tuple(tie.holders) for tie in ties))


def _place(parameter: nn.Parameter) -> tuple[tuple[int, int], str]:
    """Where a parameter lies, and of what kind it is."""
    local, layout = to_local(parameter.detach()), layout_of(parameter)
    spread = "" if layout is None else f" placed {parameter.placements} on a mesh of {layout.mesh_shape}"  # type: ignore[attr-defined]
    return (os.getpid(), local.data_ptr()), kind_of(parameter) + spread
