"""Idle time by cause, read off the times of a plan, simulated or measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from penstock.plan import Plan
from penstock.plan.actions import KEY, MICROBATCH_FIELD, OP, partner_of, parts, with_op
from penstock.plan.ops import BESIDE, COMPUTES, ROWS, SENDS

_Times = Sequence[Sequence[float]]


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


def idle_of(plan: Plan, starts: _Times, ends: _Times) -> tuple[Idle, ...]:
    """One `Idle` a rank. A gap before an action is split where the last value that it needs was sent, or computed.

    Before that the value was not there yet (imbalance), after it the value was under way (communication; in a measured
    timeline that includes what the rank itself spends between two actions).
    """
    given = _given(plan, starts, ends)
    busy = [list(_busy(plan.codes[rank], starts[rank], ends[rank])) for rank in range(plan.num_ranks)]
    first = min((spans[0][1] for spans in busy if spans), default=0.0)
    last = max((spans[-1][2] for spans in busy if spans), default=0.0)
    return tuple(_idle(plan, spans, given, first=first, last=last) for spans in busy)


def _idle(
    plan: Plan, spans: list[tuple[int, float, float]], given: dict[int, float], *, first: float, last: float
) -> Idle:
    if not spans:
        return Idle(draining=last - first)
    needs = plan.rules.needs
    communication = imbalance = 0.0
    now = spans[0][2]
    for code, start, end in spans[1:]:
        if start > now:
            values = (given.get(n | part & MICROBATCH_FIELD, -inf) for part in parts(code) for n in needs(part & KEY))
            computed = min(max([now, *values]), start)
            imbalance += computed - now
            communication += start - computed
        now = end
    return Idle(spans[0][1] - first, last - now, communication, imbalance)


def _busy(codes: Sequence[int], starts: Sequence[float], ends: Sequence[float]) -> Iterator[tuple[int, float, float]]:
    """What occupies a rank, in its order."""
    for code, start, end in zip(codes, starts, ends, strict=True):
        if code & OP in COMPUTES or (end > start and code & OP not in BESIDE):
            yield code, start, end


def _given(plan: Plan, starts: _Times, ends: _Times) -> dict[int, float]:
    """When each value left the rank that made it: as its message was sent, or, where there are none, as it was computed."""
    given: dict[int, float] = {}
    lowered = plan.is_lowered
    for codes, began, ended in zip(plan.codes, starts, ends, strict=True):
        for code, start, end in zip(codes, began, ended, strict=True):
            if lowered:
                if code & OP in SENDS:
                    given[partner_of(code)] = start
                continue
            for part in parts(code):
                for op in (part & OP, *ROWS[part & OP].halves):
                    given[with_op(part, op)] = end
    return given
