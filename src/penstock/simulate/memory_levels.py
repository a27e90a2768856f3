"""What a rank holds for the microbatches in flight, and why: the changes that each action of its list makes.

    [change.size for change in changes(plan, 0, costs)]
    levels(plan, 0, costs)[-1]              # what is held after the last action, by kind

Sizes are those of `Costs`: bytes, where the costs are in bytes. Messages count where `output_bytes` is given: a receive has
its buffer from when it is posted; a gradient that is to be sent, and the input that it belongs to, stay until it is there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
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
    return list(_Ledger(plan, rank, costs).changes())


def levels(plan: Plan, rank: int, costs: Costs) -> list[dict[str, float]]:
    """What is held after each action of a rank, by kind.

    >>> from penstock.schedules import get_schedule
    >>> plan = get_schedule("gpipe")(1, 2)
    >>> [level["activations"] for level in levels(plan, 0, Costs.unit(plan))]
    [1.0, 2.0, 1.0, 0.0]
    """
    at_place: defaultdict[int, list[Change]] = defaultdict(list)
    for change in changes(plan, rank, costs):
        at_place[change.place].append(change)
    now, found = dict.fromkeys(KINDS, 0.0), []
    for place in range(len(plan.codes[rank])):
        for change in at_place[place]:
            now[change.kind] += change.size
        found.append(dict(now))
    return found


class _Ledger:
    """Goes through the list of a rank once. `held` says what there is now, by what it is, stage and microbatch."""

    def __init__(self, plan: Plan, rank: int, costs: Costs) -> None:
        self.plan, self.rank, self.costs = plan, rank, costs
        self.codes = plan.codes[rank]
        self.held: dict[_Key, tuple[str, float]] = {}
        chosen = {(stage_of(code), microbatch_of(code)): code & OP for code in self.codes if code & OP in CHOICES}
        self.spared = {key: costs.sizes(ROWS[op].spares) for key, op in chosen.items()}
        self.repeated = {key for key, op in chosen.items() if op == Op.R}
        self.sizes = [(costs.sizes(row.takes), costs.sizes(row.leaves)) for row in ROWS]
        forward, backward = costs.sizes("forward_moment"), costs.sizes("backward_moment")
        self.moments = dict.fromkeys(COMPUTES, backward) | {Op.F: forward, Op.R: forward}
        self.moments |= {Op.I: costs.input_moment or backward, Op.W: costs.weight_moment or backward}
        # Forwards whose backward is split cast for themselves, beside autocast. By stage and kind: before the first of them.
        self.uncast = {(stage, split): size for stage, size in enumerate(costs.casts or ()) for split in (False, True)}
        asked = any(costs.casts or ()) or self.repeated
        each: Iterable[int] = (part for code in self.codes for part in parts(code)) if asked else ()
        self.split = {(stage_of(part), microbatch_of(part)) for part in each if part & OP == Op.I}
        self.sent = Counter[tuple[int, int]]()  # by stage and microbatch: to how many ranks

    def changes(self) -> Iterator[Change]:
        for place, code in enumerate(self.codes):
            for part in parts(code):
                if part & OP in COUNTED:
                    yield from (Change(place, False, *each) for each in self.starting(part) if each[1])
                    yield from (Change(place, True, *each) for each in self.ending(part) if each[1])
        for key in [*self.held]:
            yield from (Change(len(self.codes) - 1, True, *each) for each in self.drop(key) if each[1])

    def starting(self, code: int) -> Iterator[tuple[str, float]]:
        op, stage, microbatch = code & OP, stage_of(code), microbatch_of(code)
        takes = self.sizes[op][0]
        if op == Op.F:
            yield CASTS, self.uncast.pop((stage, (stage, microbatch) in self.split), 0.0)
            for producer in self.plan.graph.producers(stage):
                yield from self.drop(("received", producer, stage, microbatch))
        if takes is not None:
            size = takes[stage] - (self.unsaved(stage, microbatch) if op == Op.R else 0.0)
            yield from self.set(("stage", stage, microbatch), ACTIVATIONS, size)
        if op in COMPUTES:
            yield MOMENTS, self.moment(code)
        if op in RECEIVES and self.costs.output_bytes:
            yield from self.set(("received", peer_of(code), stage, microbatch), BUFFERS, self.crossing(code))

    def ending(self, code: int) -> Iterator[tuple[str, float]]:
        op, stage, microbatch = code & OP, stage_of(code), microbatch_of(code)
        leaves = self.sizes[op][1]
        if op in COMPUTES:
            yield MOMENTS, -self.moment(code)
        if op == Op.F:
            spared = self.spared.get((stage, microbatch))
            leaves = spared if self.plan.has_backward else self.costs.sizes(NOTHING)
        if leaves is not None:
            kind = INPUTS if op in (Op.F, Op.O) else ACTIVATIONS
            yield from self.set(("stage", stage, microbatch), kind, leaves[stage])
        if self.costs.output_bytes is not None:
            if op == Op.F and (stage, microbatch) in self.repeated:
                yield from self.given(stage, microbatch)
            elif op in INPUT_GRADIENTS:
                yield from self.passed_back(stage, microbatch)
            elif op in SENDS:
                yield from self.sending(code)

    def set(self, key: _Key, kind: str, size: float) -> Iterator[tuple[str, float]]:
        """What is held under a key from now on, for a microbatch of size 1."""
        size *= self.costs.scale(key[-1])
        before = self.held.get(key, (kind, 0.0))
        if before[0] != kind:
            yield from self.drop(key)
            before = kind, 0.0
        self.held[key] = kind, size
        yield kind, size - before[1]

    def drop(self, key: _Key) -> Iterator[tuple[str, float]]:
        if key in self.held:
            kind, size = self.held.pop(key)
            yield kind, -size

    def moment(self, code: int) -> float:
        """Beside what is held: where that is less by an output, as much more."""
        stage, microbatch = stage_of(code), microbatch_of(code)
        sizes = self.moments[code & OP]
        more = self.unsaved(stage, microbatch) if sizes and code & OP in (Op.R, Op.B) else 0.0
        return (sizes[stage] + more) * self.costs.scale(microbatch) if sizes else 0.0

    def unsaved(self, stage: int, microbatch: int) -> float:
        """What an R leaves out, which ends with the last tensor that a full backward needs."""
        key = stage, microbatch
        return (
            self.costs.unsaved[stage] if self.costs.unsaved and key in self.repeated and key not in self.split else 0.0
        )

    def crossing(self, code: int) -> float:
        """The bytes of a message."""
        return (self.costs.output_bytes or ())[min(stage_of(code), peer_of(code))]

    def given(self, stage: int, microbatch: int) -> Iterator[tuple[str, float]]:
        """The output of a forward that will be run again: it stays as long as another stage here, or a send, needs it."""
        size = (self.costs.output_bytes or ())[stage]
        consumers = self.plan.graph.consumers(stage)
        if any(self.plan.placement.rank_of(one) == self.rank for one in consumers):
            yield from self.set(("input", stage, 0, microbatch), INPUTS, size)
        elif consumers and self.plan.is_lowered:
            yield from self.set(("output", stage, 0, microbatch), BUFFERS, size)

    def passed_back(self, stage: int, microbatch: int) -> Iterator[tuple[str, float]]:
        """After a backward its gradient is used up, and that of its input is there."""
        sizes = self.costs.output_bytes or ()
        for consumer in self.plan.graph.consumers(stage):
            yield from self.drop(("received", consumer, stage, microbatch))
        yield from self.drop(("gradient", stage, 0, microbatch))  # from a stage after it on this rank
        for producer in self.plan.graph.producers(stage):
            if self.plan.placement.rank_of(producer) == self.rank:
                yield from self.drop(("input", producer, 0, microbatch))
                yield from self.set(("gradient", producer, 0, microbatch), BUFFERS, sizes[producer])
            elif self.plan.is_lowered:
                both = 2 * sizes[min(producer, stage)]  # the input too, until its gradient is sent
                yield from self.set(("back", stage, producer, microbatch), BUFFERS, both)

    def sending(self, code: int) -> Iterator[tuple[str, float]]:
        """What is sent stays until it is there."""
        stage, peer, microbatch = stage_of(code), peer_of(code), microbatch_of(code)
        if code & OP == Op.SEND_B:
            yield from self.drop(("back", stage, peer, microbatch))
            return
        others = {self.plan.placement.rank_of(one) for one in self.plan.graph.consumers(stage)} - {self.rank}
        self.sent[stage, microbatch] += 1
        if self.sent[stage, microbatch] >= len(others):  # no other rank is sent the same output later
            yield from self.drop(("output", stage, 0, microbatch))
