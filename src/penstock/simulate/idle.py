"""Idle time by cause, read off the times of a plan, simulated or measured."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from penstock.plan.actions import KEY, MICROBATCH_FIELD, OP, partner_of, parts, with_op
from penstock.plan.ops import ROWS, SENDS

if TYPE_CHECKING:
    from penstock.simulate.timeline import Timeline


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


def idle_of(timeline: Timeline) -> tuple[Idle, ...]:
    """One `Idle` a rank. A gap before an action is split where the last value that it needs was sent, or computed.

    Before that the value was not there yet (imbalance), after it the value was under way (communication; in a measured
    timeline that includes what the rank itself spends between two actions).
    """
    given, needs = _given(timeline), timeline.plan.rules.needs
    begin, end = timeline.start, timeline.start + timeline.makespan
    found = []
    for rank in range(timeline.plan.num_ranks):
        spans = [*timeline.occupying(rank)]
        if not spans:
            found.append(Idle(draining=end - begin))
            continue
        communication = imbalance = 0.0
        now = spans[0][2]
        for code, start, until in spans[1:]:
            if start > now:
                values = (
                    given.get(n | part & MICROBATCH_FIELD, -inf) for part in parts(code) for n in needs(part & KEY)
                )
                computed = min(max([now, *values]), start)
                imbalance += computed - now
                communication += start - computed
            now = until
        found.append(Idle(spans[0][1] - begin, end - now, communication, imbalance))
    return tuple(found)


def _given(timeline: Timeline) -> dict[int, float]:
    """When each value left the rank that made it: as its message was sent, or, where there are none, as it was computed."""
    if timeline.plan.is_lowered:
        return {partner_of(code): start for _, code, start, _ in timeline.every() if code & OP in SENDS}
    given: dict[int, float] = {}
    for _, code, _, end in timeline.every():
        for part in parts(code):
            for op in (part & OP, *ROWS[part & OP].halves):
                given[with_op(part, op)] = end
    return given
