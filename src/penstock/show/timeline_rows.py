"""Rows of a timeline plot: compute actions of each rank, copies of its copy engine, and the time that they cover."""

from __future__ import annotations

from typing import NamedTuple

from penstock.plan.actions import OP
from penstock.plan.ops import BESIDE, COPIES
from penstock.simulate import Timeline


class Bar(NamedTuple):
    """One packed action that occupies its rank, or its rank's copy engine: everything but a message."""

    code: int
    start: float
    end: float


class Picture(NamedTuple):
    """The rows of a timeline, each in its order, and the time that they cover: more than the computing, if it loads before.

    >>> from penstock.schedules import get_schedule
    >>> from penstock.simulate import simulate
    >>> picture = Picture.of(simulate(get_schedule("1f1b")(4, 8)))
    >>> picture.start, picture.length, len(picture.ranks[0]), picture.copies
    (0.0, 33.0, 16, [])
    """

    start: float
    length: float
    ranks: list[list[Bar]]
    copies: list[list[Bar]]  # by rank: of its copy engine; none at all where a plan copies nothing

    @classmethod
    def of(cls, timeline: Timeline) -> Picture:
        timed = [[Bar(*one) for one in timeline.timed(rank)] for rank in range(timeline.plan.num_ranks)]
        ranks = [[bar for bar in row if bar.code & OP not in BESIDE] for row in timed]
        copies = [[bar for bar in row if bar.code & OP in COPIES] for row in timed]
        bars = [bar for row in (*ranks, *copies) for bar in row]
        start = min([timeline.start, *(bar.start for bar in bars)])
        end = max([timeline.start + timeline.makespan, *(bar.end for bar in bars)])
        return cls(start, end - start, ranks, copies if any(copies) else [])
