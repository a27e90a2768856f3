"""A timeline in the terminal: one row a rank, one column a slot, folded into blocks when wider than the screen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.checks import check_types
from penstock.errors import PlanError
from penstock.plan import Op, Plan
from penstock.plan.actions import OP, microbatch_of, parts, stage_of, text
from penstock.plan.ops import OVERLAP
from penstock.show.colors import Paint, paint, shades
from penstock.show.summary import time_text
from penstock.show.time_grid import Cell, Grid, cut
from penstock.simulate import Timeline, simulate

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_DIM: Final = "dim"


class Piece(NamedTuple):
    """A bit of a line, and its style in the words of rich; "": as it is."""

    text: str
    style: str = ""


def _painted(colour: Paint) -> str:
    return f"{colour.ink} on {colour.fill}"


_FINE, _ASCII = ("·", "─", "│"), (".", "-", "|")  # the signs that a table is made of: idle, goes on, edge


def to_table(shown: Timeline | Plan, *, width: int = 100, ascii_only: bool = False) -> str:
    """The table as plain text; a plan is timed with unit costs.

    >>> from penstock.schedules import get_schedule
    >>> print(to_table(get_schedule("1f1b")(2, 2)), end="")
            0  1  2  3  4  5  6  7  8
    rank 0 │F0 F1 ·  ·  B0 ─  ·  B1 ─
    rank 1 │·  F0 B0 ─  F1 B1 ─  ·  ·
    F forward, B backward; one column is 1
    """
    check_types("to_table", PlanError, shown=(shown, Timeline | Plan), width=(width, int))
    check_types("to_table", PlanError, ascii_only=(ascii_only, bool | int))
    return _plain(_Layout(_timed(shown), coloured=False, marks=_ASCII if ascii_only else _FINE).lines(width))


def coloured_table(shown: Timeline | Plan, *, width: int = 100) -> Text:
    """The table as a rich text: a colour for each kind of action, a shade for each stage, the microbatch's number.

    Console().print(coloured_table(timeline))
    """
    check_types("coloured_table", PlanError, shown=(shown, Timeline | Plan), width=(width, int))
    return _rich(_Layout(_timed(shown), coloured=True, marks=_FINE).lines(width))


def listing(plan: Plan, *, width: int = 100) -> str:
    """Every action of every rank in its order, messages included, as plain text.

    >>> print(listing(Plan.of(["0F0,0B0".split(","), "1F0,1B0".split(",")])), end="")
    rank 0 │0F0 0B0
    rank 1 │1F0 1B0
    """
    check_types("listing", PlanError, plan=(plan, Plan), width=(width, int))
    return _plain(_listed(plan, width))


def show_table(shown: Timeline | Plan, console: Console | None = None, *, actions: bool = False) -> None:
    """Write the table (or, with `actions`, the list of actions) to a console, in colour if that can show colour.

    show_table(simulate(plan))
    """
    from rich.console import Console

    check_types("show_table", PlanError, shown=(shown, Timeline | Plan), console=(console, Console | None))
    check_types("show_table", PlanError, actions=(actions, bool | int))
    console = console or Console()
    colour = console.is_terminal and console.color_system is not None
    if actions:
        lines = _listed(shown if isinstance(shown, Plan) else shown.plan, console.width)
    else:
        marks = _FINE if colour or console.encoding.startswith("utf") else _ASCII
        lines = _Layout(_timed(shown), coloured=colour, marks=marks).lines(console.width)
    made = _rich(lines) if colour else _plain(lines)
    console.print(made, soft_wrap=True, end="", markup=False, highlight=False, emoji=False)


def _timed(shown: Timeline | Plan) -> Timeline:
    return simulate(shown) if isinstance(shown, Plan) else shown


def _plain(lines: Iterable[list[Piece]]) -> str:
    return "".join("".join(piece.text for piece in line).rstrip() + "\n" for line in lines)


class _Layout:
    """Layout of one table."""

    def __init__(self, timeline: Timeline, *, coloured: bool, marks: tuple[str, str, str]) -> None:
        self.timeline, self.coloured = timeline, coloured
        self.no_action, self.more, self.edge = marks
        self.grid: Grid = cut(timeline)
        self.shades = shades(timeline.plan)
        self.single = timeline.plan.num_stages == timeline.plan.num_ranks
        slots = [slot for row in (*self.grid.rows, *self.grid.copies) for slot in row]
        # The narrowest columns in which every label, and a space after it, fits into the slots of its action.
        fitting = (-(-(len(self.label(slot.code)) + 1) // slot.width) for slot in slots)
        self.cell = max(3 if coloured else 2, *fitting, 0)
        self.ops = {part & OP for slot in slots for part in parts(slot.code)}
        self.gutter = len(f"rank {timeline.plan.num_ranks - 1} ")

    def label(self, code: int) -> str:
        if code & OP == OVERLAP:
            return ("  " if self.coloured else "+").join(self.label(part) for part in parts(code))
        op, stage, microbatch = Op(code & OP), stage_of(code), microbatch_of(code)
        if not op.has_microbatch:
            return f"{op.row.letter}{stage}"
        if self.coloured:
            return str(microbatch)
        return f"{op.name}{microbatch}" if self.single else text(code)

    def lines(self, width: int) -> Iterator[list[Piece]]:
        room = max(1, (width - self.gutter - 1) // self.cell)
        rows = []
        for rank, cells in enumerate(self.grid.rows):
            rows.append((f"rank {rank} ", self.folded(cells, room)))
            rows += [("copies ", self.folded(copies, room)) for copies in self.grid.copies[rank : rank + 1]]
        for first in range(0, self.grid.num_columns, room):
            if first:
                yield []
            ruler = self.ruler(first, min(first + room, self.grid.num_columns))
            yield [Piece(" " * (self.gutter + 1)), Piece(ruler, _DIM)]
            for head, blocks in rows:
                yield [Piece(head.rjust(self.gutter)), Piece(self.edge, _DIM), *blocks[first // room]]
        yield list(self.legend())

    def ruler(self, first: int, last: int) -> str:
        """The times at which columns begin: at every column, or at every second, third, .. if that is too tight."""
        marks = [f"{column * self.grid.unit:{'.5g' if self.grid.exact else '.3g'}}" for column in range(first, last)]
        every = -(-(max(map(len, marks)) + 1) // self.cell)
        line = "".join(mark.ljust(self.cell * every) for mark in marks[::every])
        return line[: (last - first) * self.cell].rstrip()

    def folded(self, cells: Iterable[Cell], room: int) -> list[list[Piece]]:
        """A row, in blocks of so many columns."""
        letters = [(style, letter) for whole, style in self.row(cells) for letter in whole]
        width = room * self.cell
        blocks = (groupby(letters[first : first + width], itemgetter(0)) for first in range(0, len(letters), width))
        return [[Piece("".join(letter for _, letter in run), style) for style, run in block] for block in blocks]

    def row(self, cells: Iterable[Cell]) -> Iterator[Piece]:
        at = 0
        for slot in cells:
            yield self.idle(slot.column - at)
            yield from self.action(slot)
            at = slot.column + slot.width
        yield self.idle(self.grid.num_columns - at)

    def idle(self, columns: int) -> Piece:
        return Piece(self.no_action.ljust(self.cell) * columns, _DIM)

    def action(self, slot: Cell) -> Iterator[Piece]:
        """The columns of one action: its label first, then what shows that it goes on; a pair shares them."""
        if not self.coloured:
            label = self.label(slot.code)
            covered = -(-(len(label) + 1) // self.cell)
            yield Piece(label.ljust(covered * self.cell) + self.more.ljust(self.cell) * (slot.width - covered))
            return
        split, width = parts(slot.code), slot.width * self.cell
        share = width // len(split)
        for part, room, indent in zip(split, (share, width - share), (self.cell - 1, 0), strict=False):
            colour = paint(Op(part & OP), *self.shades[stage_of(part)])
            yield Piece(f"{self.label(part).rjust(indent)} ".ljust(room)[:room], _painted(colour))

    def legend(self) -> Iterator[Piece]:
        for number, op in enumerate(op for op in Op if op in self.ops):
            if number:
                yield Piece("  " if self.coloured else ", ")
            letter = op.row.letter or op.name
            yield Piece(f" {letter} ", _painted(paint(op))) if self.coloured else Piece(letter)
            yield Piece(f" {op.row.word}")
        close = "is" if self.grid.exact else "is about"
        yield Piece(f"; one column {close} {time_text(self.grid.unit, self.timeline.unit)}")


def _listed(plan: Plan, width: int) -> Iterator[list[Piece]]:
    gutter = len(f"rank {plan.num_ranks - 1} ")
    shade = shades(plan)
    for rank, codes in enumerate(plan.codes):
        line, used = [Piece(f"rank {rank} ".rjust(gutter)), Piece(_FINE[-1], _DIM)], gutter + 1
        for code in codes:
            word = text(code)
            if used + len(word) > width and used > gutter + 1:
                yield line
                line, used = [Piece(" " * gutter), Piece(_FINE[-1], _DIM)], gutter + 1
            first = parts(code)[0]
            op = Op(first & OP)
            painted = _DIM if op.is_message else _painted(paint(op, *shade[stage_of(first)]))
            line += [Piece(word, painted), Piece(" ")]
            used += len(word) + 1
        yield line


def _rich(lines: Iterable[list[Piece]]) -> Text:
    from rich.text import Text

    return Text.assemble(*(piece for line in lines for piece in [*line, Piece("\n")]), no_wrap=True, overflow="ignore")
