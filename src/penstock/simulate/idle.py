"""Idle time by cause, read off the times of a lowered plan: what a measured timeline has, which nobody simulated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.plan import Plan, Rules
from penstock.plan.actions import KEY, MICROBATCH_FIELD, OP, partner_of, parts
from penstock.plan.ops import COMPUTES, MESSAGES, RECEIVES, SENDS
from penstock.simulate.timeline import Idle


def idle_of(plan: Plan, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]) -> tuple[Idle, ...]:
    """One `Idle` a rank. A gap before an action is split where the last value that it needs from another rank was sent:

        >>> from penstock.lower import lower
        >>> from penstock.schedules import get_schedule
        >>> from penstock.simulate import simulate
        >>> timeline = simulate(lower(get_schedule("1f1b")(4, 8)))
        >>> idle_of(timeline.plan, timeline.starts, timeline.ends) == timeline.idle
        True

    before that the value was not computed yet (imbalance), after it the value was under way (communication; in a measured
    timeline that includes what the rank itself spends between two actions).
    """
    rules = Rules(plan.graph, plan.placement, lowered=True)
    sent = {
        code: start
        for codes, began in zip(plan.codes, starts, strict=True)
        for code, start in zip(codes, began, strict=True)
        if code & OP in SENDS
    }
    busy = [list(_busy(plan.codes[rank], starts[rank], ends[rank])) for rank in range(plan.num_ranks)]
    first = min((spans[0][1] for spans in busy if spans), default=0.0)
    last = max((spans[-1][2] for spans in busy if spans), default=0.0)
    return tuple(_idle(spans, rules, sent, first=first, last=last) for spans in busy)


def _idle(
    spans: list[tuple[int, float, float]], rules: Rules, sent: dict[int, float], *, first: float, last: float
) -> Idle:
    if not spans:
        return Idle(draining=last - first)
    communication = imbalance = 0.0
    now = spans[0][2]
    for code, start, end in spans[1:]:
        if start > now:
            computed = min(max(_sent(code, rules, sent), now), start)
            imbalance += computed - now
            communication += start - computed
        now = end
    return Idle(spans[0][1] - first, last - now, communication, imbalance)


def _busy(codes: Sequence[int], starts: Sequence[float], ends: Sequence[float]) -> Iterator[tuple[int, float, float]]:
    """What occupies a rank, in its order."""
    for code, start, end in zip(codes, starts, ends, strict=True):
        if code & OP in COMPUTES or (end > start and code & OP not in MESSAGES):
            yield code, start, end


def _sent(code: int, rules: Rules, sent: dict[int, float]) -> float:
    """When the last message for an action was sent; minus infinity if it needs none."""
    return max(
        (
            sent[partner_of(need | part & MICROBATCH_FIELD)]
            for part in parts(code)
            for need in rules.needs(part & KEY)
            if need & OP in RECEIVES
        ),
        default=float("-inf"),
    )
