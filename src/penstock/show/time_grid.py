"""A timeline cut into equal slots, as a terminal can show it: each action covers a whole number of columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from penstock.plan.actions import OP
from penstock.plan.ops import COMPUTES
from penstock.show.timeline_rows import Bar, Picture
from penstock.simulate import Timeline

_FINEST: Final = 12  # columns that the shortest action may take; beyond that the slots are rounded


class Cell(NamedTuple):
    """One packed action on one rank, over the columns from `column` on."""

    column: int
    width: int
    code: int


class Grid(NamedTuple):
    """The slots of every rank.

    >>> from penstock.schedules import get_schedule
    >>> from penstock.simulate import simulate
    >>> grid = cut(simulate(get_schedule("1f1b")(2, 2)))
    >>> grid.unit, grid.num_columns, grid.exact
    (1.0, 9, True)
    """

    unit: float  # the time of one column
    exact: bool  # whether every action starts and ends on a column; if not, the times are rounded
    rows: tuple[tuple[Cell, ...], ...]  # one a rank, in the order of columns
    copies: tuple[tuple[Cell, ...], ...] = ()  # likewise, of the copy engines, where a plan uses them

    @property
    def num_columns(self) -> int:
        return max((row[-1].column + row[-1].width for row in (*self.rows, *self.copies) if row), default=0)


def cut(timeline: Timeline) -> Grid:
    """Choose the longest unit of time that every start and end is a multiple of, and cut the timeline into it.

    Measured times have no such unit; there the columns are about a quarter of a usual action, every action covers at
    least one, and `Grid.exact` is False. Messages are no slots. An action that takes no time has no column when exact.
    """
    picture = Picture.of(timeline)
    since = picture.start
    spans = [  # the care of parameters has no column when it takes no time
        [Bar(code, start - since, end - since) for code, start, end in row if end > start or code & OP in COMPUTES]
        for row in (*picture.ranks, *picture.copies)
    ]
    durations = sorted(end - start for row in spans for _, start, end in row if end > start)
    common = _common_unit(spans, durations[0]) if durations else None
    unit = common or (max(durations[0], durations[len(durations) // 2] / 4) if durations else 1.0)
    slots = [tuple(_slots(row, unit, least=0 if common else 1)) for row in spans]
    ranks = len(picture.ranks)
    return Grid(unit, common is not None, tuple(slots[:ranks]), tuple(slots[ranks:]))


def _slots(spans: list[Bar], unit: float, *, least: int) -> Iterator[Cell]:
    """One action after another; what has no column is left out."""
    free = 0
    for code, start, end in spans:
        column = max(free, round(start / unit))
        free = max(column + least, round(end / unit))
        if free > column:
            yield Cell(column, free - column, code)


def _common_unit(spans: list[list[Bar]], shortest: float) -> float | None:
    """The greatest common divisor of all starts and ends; None if it is much finer than the shortest action."""
    slack, unit = shortest * 1e-6, shortest
    for time in {time for row in spans for _, start, end in row for time in (start, end)}:
        unit = _divisor(unit, time, slack)
        if unit < shortest / _FINEST:
            return None
    return unit


def _divisor(unit: float, time: float, slack: float) -> float:
    """Euclid's algorithm, where a rest below `slack` (or that close to the whole) is none."""
    while time > slack:
        rest = unit % time
        unit, time = time, 0.0 if time - rest <= slack else rest
    return unit
