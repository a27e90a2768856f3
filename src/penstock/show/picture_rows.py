"""What stands in the rows of a picture: what occupies a rank, what its copy engine does, and the time that they cover."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from penstock.plan import Op, Plan
from penstock.plan.actions import OP
from penstock.plan.ops import COPIES, MESSAGES
from penstock.simulate import Timeline


class Bar(NamedTuple):
    """One packed action that occupies its rank, or its rank's copy engine: everything but a message."""

    code: int
    start: float
    end: float


def bars(timeline: Timeline, rank: int, *, copies: bool = False) -> Iterator[Bar]:
    """The actions of one rank that occupy it, or its copy engine, in their order."""
    for code, start, end in timeline.timed(rank):
        if code & OP not in MESSAGES and (code & OP in COPIES) == copies:
            yield Bar(code, start, end)


def has_copies(plan: Plan) -> bool:
    """Whether a picture needs rows for the copy engines."""
    return any(plan.has(Op(number)) for number in COPIES)


class Extent(NamedTuple):
    """The time that a picture covers. It may begin before the first compute action, and end after the last."""

    start: float
    end: float

    @property
    def length(self) -> float:
        return self.end - self.start


def extent(timeline: Timeline) -> Extent:
    """From the first start to the last end of all actions, messages aside.

    >>> from penstock.schedules import get_schedule
    >>> from penstock.simulate import simulate
    >>> extent(simulate(get_schedule("1f1b")(4, 8)))
    Extent(start=0.0, end=33.0)
    """
    start, end = timeline.start, timeline.start + timeline.makespan
    for rank in range(timeline.plan.num_ranks):
        for bar in (*bars(timeline, rank), *bars(timeline, rank, copies=True)):
            start, end = min(start, bar.start), max(end, bar.end)
    return Extent(start, end)
