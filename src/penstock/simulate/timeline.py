"""Timeline: when everything happened, simulated or measured, and the figures that follow from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from operator import sub
from typing import NamedTuple

from penstock.checks import entry
from penstock.plan import Plan
from penstock.plan.actions import KEY, MICROBATCH_FIELD, OP, AnyAction, partner_of, parts, unpack, with_op
from penstock.plan.ops import BESIDE, COMPUTES, RECEIVES, ROWS, SENDS
from penstock.simulate.costs import Costs
from penstock.simulate.planned_memory import changes

Curve = Sequence[tuple[float, float]]  # (time, what is held from then on)


class Span(NamedTuple):
    """One action in time. A compute span occupies its rank; a message's span is the time that it was under way.

    [span.start for span in timeline.spans(0)]
    """

    rank: int
    action: AnyAction
    start: float
    end: float


class Message(NamedTuple):
    """One message from rank to rank: when it was posted and when it had arrived.

    [message.arrived for message in timeline.messages]
    """

    sender: int
    receiver: int
    send: AnyAction
    recv: AnyAction
    posted: float  # by the sender
    arrived: float
    opened: float  # when the receive was posted


@dataclass(frozen=True)
class Idle:
    """The idle time of one rank, by cause.

    simulate(plan).idle[0].filling
    """

    filling: float = 0.0  # before its first action
    draining: float = 0.0  # after its last action, until the last rank is done
    communication: float = 0.0  # the value was computed, and was under way
    imbalance: float = 0.0  # the value was not computed yet

    @property
    def total(self) -> float:
        return self.filling + self.draining + self.communication + self.imbalance


@dataclass(frozen=True)
class Timeline:
    """When each action of a plan started and ended.

    >>> from penstock.schedules import get_schedule
    >>> from penstock.simulate import simulate
    >>> timeline = simulate(get_schedule("1f1b")(4, 8))
    >>> timeline.makespan
    33.0
    >>> round(timeline.bubble_makespan, 4), timeline.peak_memory[0]
    (0.2727, 4.0)
    """

    plan: Plan
    starts: tuple[Sequence[float], ...] = field(repr=False)  # beside plan.codes: starts[rank][i] is of codes[rank][i]
    ends: tuple[Sequence[float], ...] = field(repr=False)
    costs: Costs | None = field(repr=False, default=None)  # what it was simulated with, or is compared with
    recorded_memory: tuple[Curve, ...] | None = field(repr=False, default=None)  # one a rank, where it was measured
    measured: bool = False  # measured on real ranks, or simulated
    unit: str = ""  # of the times: "s" when measured, as the costs say when simulated
    # by rank: how long it had a processor, where that is known
    processor: tuple[float, ...] | None = field(repr=False, default=None)

    def timed(self, rank: int) -> Iterator[tuple[int, float, float]]:
        """The packed actions of a rank, each with its start and its end."""
        codes = entry(self.plan.codes, rank, "timed(rank")
        return zip(codes, self.starts[rank], self.ends[rank], strict=True)

    def every(self) -> Iterator[tuple[int, int, float, float]]:
        """The packed actions of all ranks: rank, action, start, end."""
        return ((rank, *timed) for rank in range(self.plan.num_ranks) for timed in self.timed(rank))

    def occupying(self, rank: int) -> Iterator[tuple[int, float, float]]:
        """Yield the actions that occupy a rank: no messages, no copies, and none of zero length."""
        for code, start, end in self.timed(rank):
            if code & OP in COMPUTES or (end > start and code & OP not in BESIDE):
                yield code, start, end

    def spans(self, rank: int) -> Iterator[Span]:
        for code, start, end in self.timed(rank):
            yield Span(rank, unpack(code), start, end)

    def messages(self) -> Iterator[Message]:
        """Every message, in the order of the senders' lists."""
        recvs = {code: (rank, start, end) for rank, code, start, end in self.every() if code & OP in RECEIVES}
        for rank, code, start, _ in self.every():
            if code & OP in SENDS:
                receiver, opened, arrived = recvs[other := partner_of(code)]
                yield Message(rank, receiver, unpack(code), unpack(other), start, arrived, opened)

    @cached_property
    def _extents(self) -> tuple[tuple[float, float, float], ...]:
        """First start, last end and busy time of what occupies each rank."""
        found = []
        for rank in range(self.plan.num_ranks):
            spans = [*self.occupying(rank)] or [(0, 0.0, 0.0)]
            _, starts, ends = zip(*spans, strict=True)
            found.append((min(starts), max(ends), sum(map(sub, ends, starts))))
        return tuple(found)

    @property
    def start(self) -> float:
        return min(first for first, _, _ in self._extents)

    @property
    def makespan(self) -> float:
        """From the first start to the last end over all ranks."""
        return max(last for _, last, _ in self._extents) - self.start

    @property
    def longest_rank(self) -> float:
        """The longest time from a rank's own first start to its own last end."""
        return max(last - first for first, last, _ in self._extents)

    @cached_property
    def idle(self) -> tuple[Idle, ...]:
        """The idle time of each rank, by cause. A gap before an action is split where the last value that it needs was sent, or
        computed.

        Before that the value was not there yet (imbalance), after it the value was under way (communication; in a measured
        timeline that includes what the rank itself spends between two actions).
        """
        given = self.given()
        return tuple(self._idle(rank, given) for rank in range(self.plan.num_ranks))

    def _idle(self, rank: int, given: Mapping[int, float]) -> Idle:
        spans = [*self.occupying(rank)]
        if not spans:
            return Idle(draining=self.makespan)
        communication = imbalance = 0.0
        now, needs = spans[0][2], self.plan.rules.needs
        for code, start, end in spans[1:]:
            if start > now:
                needed = (need | part & MICROBATCH_FIELD for part in parts(code) for need in needs(part & KEY))
                computed = min(max([now, *(given.get(need, -inf) for need in needed)]), start)
                imbalance += computed - now
                communication += start - computed
            now = end
        return Idle(spans[0][1] - self.start, self.start + self.makespan - now, communication, imbalance)

    def given(self) -> dict[int, float]:
        """When each value left the rank that made it: as its message was sent, or, where there are none, as it was computed."""
        if self.plan.is_lowered:
            return {partner_of(code): start for _, code, start, _ in self.every() if code & OP in SENDS}
        return {
            with_op(part, op): end
            for _, code, _, end in self.every()
            for part in parts(code)
            for op in (part & OP, *ROWS[part & OP].halves)
        }

    @property
    def busy(self) -> tuple[float, ...]:
        """The time that each rank computes, or tends to its parameters."""
        return tuple(busy for _, _, busy in self._extents)

    @property
    def kept_waiting(self) -> float:
        """The time in which a rank, on average, was about to compute and had no processor for it; 0 where that is not known.

        A rank that waits for a message has no use for a processor; where one is free, a rank has it while it computes.
        """
        if self.processor is None:
            return 0.0
        ranks = enumerate(self.processor)
        taken = [(sum(e - s for code, s, e in self.timed(rank) if code & OP in COMPUTES), had) for rank, had in ranks]
        return sum(max(0.0, computing - had) for computing, had in taken) / len(taken)

    def _bubble(self, cost: float) -> float:
        return 1 - sum(self.busy) / (len(self.busy) * cost) if cost else 0.0

    @property
    def bubble_makespan(self) -> float:
        """The idle share of all ranks' time over the makespan: what counts when a step ends for all at once."""
        return self._bubble(self.makespan)

    @property
    def bubble_longest_rank(self) -> float:
        """The idle share measured on the longest rank: what the zero-bubble papers print."""
        return self._bubble(self.longest_rank)

    @cached_property
    def memory(self) -> tuple[Curve, ...]:
        """Activation memory of each rank over time: recorded, or computed from the costs."""
        if self.recorded_memory is not None:
            return self.recorded_memory
        return tuple(self._curve(rank, self.costs) for rank in range(self.plan.num_ranks)) if self.costs else ()

    def _curve(self, rank: int, costs: Costs) -> Curve:
        starts, ends = self.starts[rank], self.ends[rank]
        edges = dict[tuple[int, bool], float]()  # what the start or the end of an action changes, all in all
        for change in changes(self.plan, rank, costs):
            edge = change.place, change.at_end
            edges[edge] = edges.get(edge, 0.0) + change.size
        timed = sorted((ends[at] if at_end else starts[at], size) for (at, at_end), size in edges.items() if size)
        held, curve = 0.0, [(self.start, 0.0)]
        for time, size in timed:  # at one time, releases come before what is taken
            held += size
            curve.append((time, held))
        return curve

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """The most that each rank held at a time."""
        return tuple(max((held for _, held in curve), default=0.0) for curve in self.memory)
