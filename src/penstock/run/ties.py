"""Parameters that several stages hold: one logical parameter, the same value everywhere, one summed gradient.

Each rank's part of a step's gradient is kept apart from what `.grad` held before. After a step that succeeded on all
ranks the parts go to the owner, which adds them up in the order of ranks and sends the sum back; autograd then accumulates
that sum on every holder. So all holders have the same bits, also when gradients accumulate over steps, and equal
optimizers keep them equal. (A post-accumulate hook on such a parameter fires once more, for the sum.)
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.comm.transport import Transport
from penstock.errors import StageError
from penstock.plan import Placement
from penstock.run.layout import wire
from penstock.stage.dtensors import to_local
from penstock.stage.engine import run_engine
from penstock.stage.stage import PipelineStage

Holders = Sequence[tuple[int, str]]  # (stage, name of the parameter there), the owner first


@dataclass
class _Group:
    """One logical parameter, as seen from this rank."""

    ranks: tuple[int, ...]  # that hold it, the owner's first
    mine: tuple[nn.Parameter, ...]  # the copies on this rank
    name: str


class Ties:
    """The shared parameters of a schedule's stages."""

    def __init__(
        self, groups: Iterable[Holders], stages: Mapping[int, PipelineStage], placement: Placement, transport: Transport
    ) -> None:
        self.transport = transport
        self.groups: list[_Group] = []
        self.before: list[list[Tensor | None]] = []
        for holders in groups:
            group = self._group(holders, stages, placement)
            if len(group.mine) > 1 or (group.mine and len(group.ranks) > 1):
                if not self._one_memory(group):
                    self.groups.append(group)
        self._level()

    def _group(self, holders: Holders, stages: Mapping[int, PipelineStage], placement: Placement) -> _Group:
        ranks = dict.fromkeys(placement.rank_of(stage) for stage, _ in holders)
        mine: dict[int, nn.Parameter] = {}
        for stage, name in holders:
            if placement.rank_of(stage) == self.transport.rank:
                parameter = _named(stages[stage], name)
                mine[id(parameter)] = parameter
        if len({p.shape for p in mine.values()}) > 1:
            raise StageError(
                f"tied parameters {list(holders)} differ in shape: {[tuple(p.shape) for p in mine.values()]}"
            )
        return _Group(tuple(ranks), tuple(mine.values()), f"{holders[0][1]} of stage {holders[0][0]}")

    def _one_memory(self, group: _Group) -> bool:
        """Ranks as threads may hold the very same tensor: autograd sums its gradient already."""
        owner, *others = group.ranks
        if not others:
            return False
        where = torch.tensor([os.getpid(), group.mine[0].data_ptr()], dtype=torch.int64, device=self.transport.device)
        answer = torch.ones(1, dtype=torch.int64, device=self.transport.device)
        if self.transport.rank != owner:
            there = torch.empty_like(where)
            self.transport.irecv(there, owner).wait()
            answer.fill_(int(torch.equal(there, where)))
            self.transport.isend(answer, owner).wait()
            self.transport.irecv(answer, owner).wait()
            return bool(answer.item())
        for rank in others:
            self.transport.isend(where, rank).wait()
            theirs = torch.empty_like(answer)
            self.transport.irecv(theirs, rank).wait()
            answer *= theirs
        for rank in others:
            self.transport.isend(answer, rank).wait()
        return bool(answer.item())

    def _level(self) -> None:
        """Before the first step: every holder starts from the owner's value."""
        for group in self.groups:
            value = group.mine[0].detach()
            self._from_owner(group, wire(value), into=to_local(value))
            for parameter in group.mine[1:]:
                parameter.data.copy_(value)

    def begin(self) -> None:
        """Keep what `.grad` holds apart from what the step adds."""
        self.before = [[p.grad for p in group.mine] for group in self.groups]
        for group in self.groups:
            for parameter in group.mine:
                parameter.grad = None

    def restore(self) -> None:
        """After a failure: `.grad` is what it was."""
        if not self.before:
            return
        for group, before in zip(self.groups, self.before, strict=True):
            for parameter, grad in zip(group.mine, before, strict=True):
                parameter.grad = grad
        self.before = []

    def finish(self) -> None:
        """After a step that succeeded on all ranks."""
        totals = [self._total(group) for group in self.groups]
        self.restore()
        for group, total in zip(self.groups, totals, strict=True):
            if total is not None:
                for parameter in group.mine:
                    run_engine((parameter,), (total.clone(),))

    def _total(self, group: _Group) -> Tensor | None:
        """The gradient of this step over all holders."""
        part: Tensor | None = None
        for parameter in group.mine:
            if parameter.grad is not None:
                part = parameter.grad if part is None else part + parameter.grad
        owner, *others = group.ranks
        if self.transport.rank == owner:
            for rank in others:
                other = self._receive(rank, group)
                part = other if part is None else part if other is None else part + other
            for rank in others:
                self._send(rank, part)
            return part
        self._send(owner, part)
        return self._receive(owner, group)

    def _send(self, rank: int, grad: Tensor | None) -> None:
        flag = torch.tensor([grad is not None], dtype=torch.int64, device=self.transport.device)
        works = [self.transport.isend(flag, rank)]
        if grad is not None:
            works.append(self.transport.isend(wire(grad), rank))
        for work in works:
            work.wait()

    def _receive(self, rank: int, group: _Group) -> Tensor | None:
        flag = torch.empty(1, dtype=torch.int64, device=self.transport.device)
        self.transport.irecv(flag, rank).wait()
        if not flag.item():
            return None
        grad = torch.empty_like(group.mine[0].detach(), memory_format=torch.contiguous_format)
        self.transport.irecv(to_local(grad), rank).wait()
        return grad

    def _from_owner(self, group: _Group, value: Tensor, *, into: Tensor) -> None:
        owner, *others = group.ranks
        if self.transport.rank == owner:
            for rank in others:
                self.transport.isend(value, rank).wait()
        else:
            buffer = torch.empty_like(value)
            self.transport.irecv(buffer, owner).wait()
            with torch.no_grad():
                into.copy_(buffer)


def _named(stage: PipelineStage, name: str) -> nn.Parameter:
    """A parameter by its name, whatever data-parallel wrapper stands around the module."""
    found: dict[str, nn.Parameter] = dict(stage.submod.named_parameters(remove_duplicate=False))
    for candidate in (name, f"module.{name}"):
        if candidate in found:
            return found[candidate]
    raise StageError(
        f"stage {stage.stage_index} has no parameter {name!r} to tie; it has {', '.join(list(found)[:8]) or 'none'}"
    )
