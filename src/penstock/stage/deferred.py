"""What a stage with a split backward remembers: from microbatch to microbatch, and of one microbatch."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from penstock.errors import NotDeferred, StageError
from penstock.stage.batched import Group, Grouping, grouped
from penstock.stage.calls import Call, Nothing, Slot, Work


class DeferredGraph(Protocol):
    """The weight work of a compiled graph."""

    def gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return parameters, and a gradient for each of them. Called once."""


class Deferral:
    """What a stage with a split backward keeps from microbatch to microbatch. One for each stage.

    `enabled` may be set to False: nothing is deferred then, and the input pass is the whole backward.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self.slots: list[Slot] = [Nothing()]
        self.skip: dict[int, Tensor] = {} if module is None else _tied_outside_linear(module)
        if module is not None and (wide := _in_eight_bits(module)):
            say_not_deferred(f"layers in 8 bits ({wide})")
        self.whole: dict[int, Tensor] = {}  # parameters of compiled graphs whose backward stays in one piece
        self.looking = False  # a step in which nothing is deferred, to see who uses the parameters of graphs
        self.checked: dict[int, Tensor] = {}
        self.casts: dict[tuple[int, torch.dtype], tuple[Tensor, int, Tensor]] = {}  # under autocast: see `cast`
        self.last: list[Slot] = []  # of the last microbatch
        self.layout: Grouping | None = None
        self.news = True  # a weight may have been deferred that is not checked yet
        self.repeats = False  # some weight is used twice
        self.enabled = True
        self.proved = False  # a forward has run without differentiating inside itself

    def reset(self) -> None:
        """Forget the anchors: after an input pass that failed half-way some of them hold gradients. And the casts."""
        self.slots, self.last, self.layout = [Nothing()], [], None
        self.casts = {}

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A parameter in another type: one copy for all microbatches of a step, as autocast itself keeps it."""
        found = self.casts.get((id(tensor), dtype))
        if found is None or found[0] is not tensor or found[1] != tensor._version:
            found = self.casts[id(tensor), dtype] = tensor, tensor._version, tensor.detach().to(dtype)
        return found[2]

    def place(self, slot: Slot, *, at: int, slots: list[Slot]) -> None:
        """Put a new slot where the old one did not match."""
        self.news = True
        if any(other.weight is slot.weight for other in slots):
            self.repeats = True
        if slots[at].weight is None:
            slots.insert(at, slot)
        else:
            slots[at] = slot


_SAID: set[str] = set()


def say_not_deferred(what: str) -> None:
    """Once in the life of a process for each kind of layer."""
    kind = what.partition(" (")[0]
    if kind not in _SAID:
        _SAID.add(kind)
        warnings.warn(
            f"{what} do all weight work in the input pass of a split backward: a schedule with W gains less from them than from "
            "plain linear layers. Use a schedule with full backwards, such as 1f1b, or live with it",
            NotDeferred,
            stacklevel=2,
        )


def _in_eight_bits(module: nn.Module) -> str:
    """The kind of the first layer that multiplies in float8 by a function of its own; "" if there is none.

    >>> _in_eight_bits(nn.Linear(2, 2))
    ''
    """
    for layer in module.modules():
        kinds = type(layer), type(layer._parameters.get("weight"))  # one that is parametrised would be computed
        if any("float8" in f"{kind.__module__}.{kind.__name__}".lower() for kind in kinds):
            return type(layer).__name__
    return ""


def _tied_outside_linear(module: nn.Module) -> dict[int, Tensor]:
    """Parameters that several modules own, one of which is no `Linear`: a head tied to an embedding.

    They would receive one gradient in the input pass and another in the weight pass, and their hooks would fire twice.
    """
    uses = [(owner, used) for owner in module.modules() for used in owner._parameters.values() if used is not None]
    counts = Counter(id(used) for _, used in uses)
    return {id(used): used for owner, used in uses if counts[id(used)] > 1 and type(owner) is not nn.Linear}


class Phases:
    """Weight work of one microbatch. One owner, consumed once."""

    phase = "forward"

    def advance(self, phase: str, *, expected: str, verb: str) -> None:
        if self.phase != expected:
            raise StageError(
                f"{verb} needs weight work whose last phase is {expected!r}, got {self.phase!r}: "
                "each microbatch runs its forward, its input pass and its weight pass once, in this order"
            )
        self.phase = phase


class Pending(Phases):
    """The weight work that one microbatch's forward and input pass leave behind."""

    def __init__(self, deferral: Deferral) -> None:
        self.deferral = deferral
        self.slots = deferral.slots
        self.skip = deferral.skip
        self.index = 0
        self.records: list[Any] = []  # slot, rows, version of the rows; slot, rows, ...: flat, to spare the collector
        self.work: list[Work] = []
        self.batches: list[tuple[Group, Tensor, Tensor]] = []
        self.graphs: list[DeferredGraph] = []  # of compiled parts, once there was an input pass
        # A backward that waits for the weight pass.
        self.kept: tuple[tuple[Tensor | GradientEdge, ...], tuple[Tensor, ...]] | None = None
        self.functions: list[Call] = []  # calls that went through the autograd function
        self.deferred = False  # whether the forward ran, or runs, with deferral

    def __repr__(self) -> str:
        return f"Pending(phase={self.phase!r}, calls={len(self.calls())}, work={self.num_waiting})"

    @property
    def num_waiting(self) -> int:
        """Calls whose weight work waits for the weight pass."""
        return len(self.work) + sum(len(group.places) for group, _, _ in self.batches) + len(self.graphs)

    def harvest(self, *, in_groups: bool = True) -> None:
        """Take the gradients out of the anchors; the last call comes first, as in a backward."""
        if not in_groups or self.functions or self.deferral.repeats or not self._harvest_groups():
            work = self.work
            backwards = iter(self.records[::-1])
            for version, rows, slot in zip(backwards, backwards, backwards, strict=True):
                grad = slot.anchor.grad
                if grad is not None:
                    slot.anchor.grad = None
                    if rows._version != version:
                        raise StageError(_changed(slot, rows))
                    work += ((slot.call, rows.data, grad),)
            self.work = grouped(work) if self.functions or self.deferral.repeats else work
        self.records, self.functions = [], []

    def _harvest_groups(self) -> bool:
        """The same for calls that were the same in the last microbatch. False, and nothing done, if they were not."""
        deferral, slots = self.deferral, self.records[::3]
        layout = deferral.layout
        if layout is None or layout.slots != slots:
            if deferral.last == slots:
                deferral.layout = Grouping(slots)
            deferral.last = slots
            return False
        grads = [slot.anchor.grad for slot in slots]
        for grad in grads:
            if grad is None:
                return False
        rows, versions = self.records[1::3], self.records[2::3]
        if [row._version for row in rows] != versions:
            return False
        for slot in slots:
            slot.anchor.grad = None
        if layout.groups:
            self.batches = layout.harvest(rows, grads)
        for place in layout.singles[::-1]:
            self.work += ((slots[place].call, rows[place].data, grads[place]),)
        return True

    def calls(self) -> list[Call]:
        """What is deferred so far."""
        return [slot.call for slot in self.records[::3]] + self.functions

    def anchors(self) -> list[Tensor]:
        return [slot.anchor for slot in self.records[::3]]


def _changed(slot: Slot, rows: Tensor) -> str:
    return (
        f"the input of a linear layer with weight {tuple(slot.call.weight.shape)}, of shape {tuple(rows.shape)}, was "
        "changed in place after the layer had used it, so the gradient of the weight cannot be computed. "
        "Write `y = x + 1` instead of `x += 1` there, or give the layer a clone"
    )
