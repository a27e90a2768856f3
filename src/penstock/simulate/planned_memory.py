"""Planned activation memory of a rank: the change that each action of its list makes, and its kind.

    [change.size for change in changes(plan, 0, costs)]
    levels(plan, 0, costs)[-1]              # what is held after the last action, by kind

Sizes are those of `Costs`: bytes, where the costs are in bytes. Messages count where `output_bytes` is given: a receive has
its buffer from when it is posted; a gradient that is to be sent, and the input that it belongs to, stay until it is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Final, NamedTuple

from penstock.plan import Plan
from penstock.plan.actions import OP, microbatch_of, parts, peer_of, stage_of
from penstock.plan.ops import CHOICES, COMPUTES, COUNTED, INPUT_GRADIENTS, NOTHING, RECEIVES, ROWS, SENDS, Op
from penstock.simulate.costs import Costs

ACTIVATIONS: Final = "activations"  # what forwards saved for their backwards
INPUTS: Final = "kept inputs"  # of forwards that are run again, and what an offload leaves here
BUFFERS: Final = "message buffers"  # receives that are posted, gradients that arrived or are on their way
MOMENTS: Final = "operators"  # what operators need for a moment
CASTS: Final = "casts"  # of parameters, by autocast; they stay after the step
KINDS: Final = (ACTIVATIONS, INPUTS, BUFFERS, MOMENTS, CASTS)
_Key = tuple[str, int, int] | tuple[str, int, int, int]  # what, stages, microbatch


class Change(NamedTuple):
    """At the start or the end of an action, something is held or let go.

    Change(place=3, at_end=True, kind="activations", size=-4096.0)
    """

    place: int  # of the action in the list of its rank
    at_end: bool
    kind: str
    size: float


def changes(plan: Plan, rank: int, costs: Costs) -> list[Change]:
    """All changes on one rank, in the order of its list."""
    tracker = _MemoryTracker(plan, rank, costs)
    for place, code in enumerate(plan.codes[rank]):
        for part in parts(code):
            if part & OP in COUNTED:
                tracker.act(place, part)
    tracker.edge = len(plan.codes[rank]) - 1, True
    for key in [*tracker.held]:
        tracker.drop(key)
    return tracker.changes


def levels(plan: Plan, rank: int, costs: Costs) -> list[dict[str, float]]:
    """Return the live bytes after each action of a rank, by kind.

    >>> from penstock.schedules import get_schedule
    >>> plan = get_schedule("gpipe")(1, 2)
    >>> [level["activations"] for level in levels(plan, 0, Costs.unit(plan))]
    [1.0, 2.0, 1.0, 0.0]
    """
    found = [dict.fromkeys(KINDS, 0.0) for _ in plan.codes[rank]]
    for change in changes(plan, rank, costs):
        found[change.place][change.kind] += change.size
    for before, after in pairwise(found):
        for kind in KINDS:
            after[kind] += before[kind]
    return found


class _MemoryTracker:
    """Goes through the list of a rank once. `held` says what there is now, by what it is, stage and microbatch."""

    def __init__(self, plan: Plan, rank: int, costs: Costs) -> None:
        self.plan, self.rank, self.costs = plan, rank, costs
        self.bytes = costs.output_bytes or ()  # of messages, by the stage that sends their activation
        self.changes: list[Change] = []
        self.edge = 0, False  # place, and whether at the end: where changes are made now
        self.held: dict[_Key, tuple[str, float]] = {}
        chosen = {(stage_of(code), microbatch_of(code)): code & OP for code in plan.codes[rank] if code & OP in CHOICES}
        self.spared = {key: costs.sizes(ROWS[op].spares) for key, op in chosen.items()}
        self.repeated = {key for key, op in chosen.items() if op == Op.R}
        self.sizes = [(costs.sizes(row.takes), costs.sizes(row.leaves)) for row in ROWS]
        forward, backward = costs.sizes("forward_moment"), costs.sizes("backward_moment")
        self.moments = dict.fromkeys(COMPUTES, backward) | {Op.F: forward, Op.R: forward}
        self.moments |= {Op.I: costs.input_moment or backward, Op.W: costs.weight_moment or backward}
        # Forwards whose backward is split cast for themselves, beside autocast. By stage and kind: before the first of them.
        self.uncast = {(stage, split): size for stage, size in enumerate(costs.casts or ()) for split in (False, True)}
        asked = any(costs.casts or ()) or self.repeated
        each: Iterable[int] = (part for code in plan.codes[rank] for part in parts(code)) if asked else ()
        self.split = {(stage_of(part), microbatch_of(part)) for part in each if part & OP == Op.I}
        self.sent = Counter[tuple[int, int]]()  # by stage and microbatch: to how many ranks

    def act(self, place: int, code: int) -> None:
        """Record the changes of an action, at its start and at its end."""
        op, stage, microbatch = code & OP, stage_of(code), microbatch_of(code)
        takes, leaves = self.sizes[op]
        unsaved = self.unsaved(stage) if op in (Op.F, Op.R, Op.B, Op.I, Op.O, Op.L) else 0.0
        moment = self.moments.get(op)
        # Beside what is held: where that is less by an output, as much more.
        more = unsaved if op in (Op.R, Op.B, Op.I) else 0.0
        needed = (moment[stage] + more) * self.costs.scale(microbatch) if moment else 0.0
        self.edge = place, False
        if op == Op.F:
            self.change(CASTS, self.uncast.pop((stage, (stage, microbatch) in self.split), 0.0))
            for producer in self.plan.graph.producers(stage):
                self.drop(("received", producer, stage, microbatch))
            spared = self.spared.get((stage, microbatch))
            leaves = spared if self.plan.has_backward else self.costs.sizes(NOTHING)
        if takes is not None:
            self.set(("stage", stage, microbatch), ACTIVATIONS, takes[stage] - (unsaved if op in (Op.R, Op.L) else 0.0))
        self.change(MOMENTS, needed)
        if op in RECEIVES and self.bytes:
            peer = peer_of(code)
            self.set(("received", peer, stage, microbatch), BUFFERS, self.bytes[min(stage, peer)])
        self.edge = place, True
        self.change(MOMENTS, -needed)
        if op == Op.F and leaves is None and unsaved and takes is not None:
            self.set(("stage", stage, microbatch), ACTIVATIONS, takes[stage] - unsaved)
        if leaves is not None:
            kind = INPUTS if op in (Op.F, Op.O) else ACTIVATIONS
            self.set(("stage", stage, microbatch), kind, leaves[stage] - (unsaved if op == Op.O else 0.0))
        if self.bytes:
            if op == Op.F and (stage, microbatch) in self.repeated:
                self.given(stage, microbatch, INPUTS, BUFFERS, self.bytes[stage])
            elif op == Op.F and self.plan.has_backward:
                self.given(stage, microbatch, ACTIVATIONS, ACTIVATIONS, unsaved)
            elif op in INPUT_GRADIENTS:
                self.passed_back(stage, microbatch)
            elif op in SENDS:
                self.sending(code)

    def change(self, kind: str, size: float) -> None:
        if size:
            self.changes.append(Change(*self.edge, kind, size))

    def set(self, key: _Key, kind: str, size: float) -> None:
        """Set the live bytes of a key from now on, for a microbatch of size 1."""
        self.drop(key)
        self.held[key] = kind, size * self.costs.scale(key[-1])
        self.change(*self.held[key])

    def drop(self, key: _Key) -> None:
        if key in self.held:
            kind, size = self.held.pop(key)
            self.change(kind, -size)

    def unsaved(self, stage: int) -> float:
        """Return the size of an output that its graph does not hold."""
        return self.costs.unsaved[stage] if self.costs.unsaved else 0.0

    def given(self, stage: int, microbatch: int, here: str, sent: str, size: float) -> None:
        """An output that its graph does not hold stays as long as another stage of this rank, or a send, needs it."""
        consumers = self.plan.graph.consumers(stage)
        if any(self.plan.placement.rank_of(one) == self.rank for one in consumers):
            self.set(("input", stage, 0, microbatch), here, size)
        elif consumers and self.plan.is_lowered:
            self.set(("output", stage, 0, microbatch), sent, size)

    def passed_back(self, stage: int, microbatch: int) -> None:
        """After a backward its gradient is used up, and that of its input is there."""
        for consumer in self.plan.graph.consumers(stage):
            self.drop(("received", consumer, stage, microbatch))
        self.drop(("gradient", stage, 0, microbatch))  # from a stage after it on this rank
        for producer in self.plan.graph.producers(stage):
            if self.plan.placement.rank_of(producer) == self.rank:
                self.drop(("input", producer, 0, microbatch))
                self.set(("gradient", producer, 0, microbatch), BUFFERS, self.bytes[producer])
            elif self.plan.is_lowered:
                both = 2 * self.bytes[min(producer, stage)]  # the input too, until its gradient is sent
                self.set(("back", stage, producer, microbatch), BUFFERS, both)

    def sending(self, code: int) -> None:
        """Keep the bytes of a message until it has arrived."""
        stage, peer, microbatch = stage_of(code), peer_of(code), microbatch_of(code)
        if code & OP == Op.SEND_B:
            self.drop(("back", stage, peer, microbatch))
            return
        others = {self.plan.placement.rank_of(one) for one in self.plan.graph.consumers(stage)} - {self.rank}
        self.sent[stage, microbatch] += 1
        if self.sent[stage, microbatch] >= len(others):  # no other rank is sent the same output later
            self.drop(("output", stage, 0, microbatch))
