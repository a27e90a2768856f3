"""Plans as text: CSV files that torch reads and writes too, and a table for people. Load and dump are inverses.

A file has one row a rank and one action a cell; an empty cell is an idle slot. The compute-only and the lowered form
look alike: a lowered plan simply holds its messages as well.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from os import PathLike

from penstock.errors import ParseError, PlanError
from penstock.misfits import takes
from penstock.plan.actions import (
    KEY,
    MICROBATCH,
    MICROBATCH_SHIFT,
    OP,
    PEER_SHIFT,
    STAGE,
    STAGE_SHIFT,
    AnyAction,
    is_packed,
    microbatch_of,
    pack,
    parse,
    parts,
    peer_of,
    stage_of,
    text,
)
from penstock.plan.graph import StageGraph
from penstock.plan.ops import COMPUTES, COUNTED, MESSAGES, TRAINING
from penstock.plan.placement import Placement
from penstock.plan.plan import Plan
from penstock.plan.reading import read_text, write_text

_ACTIVATIONS = MESSAGES - TRAINING
LIMIT = 16_000_000  # bytes of a plan file: about two million actions
_Cell = AnyAction | str | int | None


@takes(PlanError)
def dumps(plan: Plan) -> str:
    """The plan as CSV text.

    dumps(get_schedule("1f1b")(2, 4))
    """
    return "".join(",".join(map(text, codes)) + "\n" for codes in plan.codes)


@takes(PlanError)
def dump(plan: Plan, path: str | PathLike[str]) -> None:
    """Write the plan as a CSV file.

    dump(get_schedule("1f1b")(2, 4), "plan.csv")
    """
    write_text(path, dumps(plan), PlanError)


@takes(PlanError)
def load(path: str | PathLike[str], *, limit: int = LIMIT, **known: object) -> Plan:
    """Read a CSV file, torch's or penstock's own.

        load("plan.csv")

    A file of more than `limit` bytes is refused: reading takes about thirty times its size in memory.

    `known` is what the file cannot tell: ``placement``, ``graph``, ``num_microbatches``, ``name``; by default they are
    read off the actions, as in `Plan.of`.
    """
    hint = ". If it is a plan, load(path, limit={size}) reads it, and takes about thirty times its size in memory"
    string = read_text(path, ParseError, limit=limit, encoding="utf-8-sig", hint=hint)
    return loads(string, source=str(path), **known)


@takes(PlanError)
def loads(string: str, *, source: str = "the text", **known: object) -> Plan:
    """Read CSV text. `source` is named in errors.

    loads("0F0,0B0\\n1F0,1B0")
    """
    try:
        rows = list(csv.reader(StringIO(string, newline="")))
    except csv.Error as error:
        raise ParseError(f"{source} is no CSV: {error}; expected one row a rank, such as 0F0,0F1,0B0,0B1") from None
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    if not rows:
        raise ParseError(f"{source} holds no action; expected one row a rank, such as 0F0,0F1,0B0,0B1")
    return read_off([[cell.strip() or None for cell in row] for row in rows], source=source, **known)  # type: ignore[arg-type]


def read_off(
    rows: Sequence[Iterable[_Cell]],
    *,
    placement: Placement | None = None,
    graph: StageGraph | None = None,
    num_microbatches: int | None = None,
    name: str = "",
    source: str = "",
) -> Plan:
    """A plan from rows of cells; see `Plan.of`. Errors name the source, the row and the column, counted from 1."""
    reader = _Reader(source, placement, graph, num_microbatches)
    codes = [tuple(reader.row(number, row)) for number, row in enumerate(rows, 1)]
    placed = reader.placement_of(codes)
    return Plan(
        placed,
        graph if graph is not None else reader.graph_of(codes, placed.num_stages),
        num_microbatches if num_microbatches is not None else max(map(microbatch_of, reader.seen), default=0) + 1,
        tuple(codes),
        name,
    )


class _Reader:
    """Reads cells into packed actions and remembers enough to complain with the place."""

    def __init__(
        self, source: str, placement: Placement | None, graph: StageGraph | None, num_microbatches: int | None
    ) -> None:
        self.source = source
        self.placement = placement
        self.num_stages = placement.num_stages if placement else graph.num_stages if graph else None
        self.num_microbatches = num_microbatches
        self.keys: dict[str, int] = {}  # the text before the microbatch -> the key
        self.seen: dict[int, tuple[int, int]] = {}  # action -> its row and column
        self.home: dict[int, tuple[int, int]] = {}  # stage -> the row and column that first put it on a rank

    def where(self, row: int, column: int) -> str:
        return f"{self.source + ', ' if self.source else ''}row {row}, column {column}"

    def row(self, row: int, cells: Iterable[_Cell]) -> Iterator[int]:
        if self.placement is not None and row > self.placement.num_ranks:
            raise ParseError(
                f"{self.where(row, 1)}: a row too many; expected {self.placement.num_ranks}, one for each rank"
            )
        for column, cell in enumerate(cells, 1):
            if cell is None or cell == "":
                continue
            try:
                code = self.packed(cell) if isinstance(cell, int) else self.code(str(cell))
                for part in parts(code):
                    self.note(part, row, column)
            except ParseError as error:
                raise ParseError(f"{self.where(row, column)}: {error}") from None
            yield code

    @staticmethod
    def packed(code: int) -> int:
        if not is_packed(code):
            raise ParseError(f"{code} is no packed action; see penstock.plan.actions")
        return code

    def code(self, cell: str) -> int:
        """Parse a cell. One that differs from an earlier cell in its microbatch alone needs no second look."""
        head = cell.rstrip("0123456789")
        digits = cell[len(head) :]
        key = self.keys.get(head)
        if key is not None and 0 < len(digits) < 8:
            return key | int(digits) << MICROBATCH_SHIFT
        code = pack(parse(cell))
        if code & OP in COUNTED and text(code) == cell and not code >> PEER_SHIFT:
            self.keys[head] = code & KEY
        return code

    def note(self, code: int, row: int, column: int) -> None:
        op, stage, microbatch = code & OP, code >> STAGE_SHIFT & STAGE, code >> MICROBATCH_SHIFT & MICROBATCH
        if self.num_stages is not None and max(stage, peer_of(code)) >= self.num_stages:
            raise ParseError(f"{text(code)} is out of range; expected stages 0 to {self.num_stages - 1}")
        if self.num_microbatches is not None and microbatch >= self.num_microbatches:
            raise ParseError(f"{text(code)} is out of range; expected microbatches 0 to {self.num_microbatches - 1}")
        if op in COUNTED:
            first = self.seen.setdefault(code, (row, column))
            if first != (row, column):
                raise ParseError(f"{text(code)} stands twice, first in {self.where(*first)}; expected each action once")
        home = row - 1 if self.placement is None else self.placement.rank_of(stage)
        if home != row - 1:
            raise ParseError(f"{text(code)} is on rank {row - 1}; expected it on rank {home}")
        if op in COMPUTES:
            first = self.home.setdefault(stage, (row, column))
            if first[0] != row:
                raise ParseError(
                    f"{text(code)} puts stage {stage} on rank {row - 1}, but {self.where(*first)} puts it on rank "
                    f"{first[0] - 1}; expected each stage on one rank"
                )

    def placement_of(self, codes: Sequence[Sequence[int]]) -> Placement:
        whole = self.source or "the plan"
        if self.placement is not None:
            if len(codes) != self.placement.num_ranks:
                expected = f"expected {self.placement.num_ranks}, one for each rank"
                raise ParseError(f"{whole} has {len(codes)} rows; {expected}")
            return self.placement
        for row, cells in enumerate(codes, 1):
            if not cells:
                raise ParseError(f"{self.where(row, 1)}: the row is empty; expected every rank to hold a stage")
        num_stages = self.num_stages if self.num_stages is not None else max(self.home, default=0) + 1
        missing = next((stage for stage in range(num_stages) if stage not in self.home), None)
        if missing is not None:
            raise ParseError(f"{whole}: no rank computes stage {missing}; expected every stage from 0 to the highest")
        self.messages_within(num_stages)
        try:
            return Placement.of([self.home[stage][0] - 1 for stage in range(num_stages)])
        except PlanError as error:
            raise ParseError(f"{whole}: {error}") from None

    def messages_within(self, num_stages: int) -> None:
        """A message must be between stages that compute, which is known only when everything is read."""
        for code, place in self.seen.items():
            low, high = sorted((stage_of(code), peer_of(code)))
            if low < 0 or high >= num_stages:
                raise ParseError(
                    f"{self.where(*place)}: {text(code)} is a message between the stages {low} and {high}; "
                    f"expected stages 0 to {num_stages - 1}"
                )

    @staticmethod
    def graph_of(codes: Sequence[Sequence[int]], num_stages: int) -> StageGraph:
        """A chain, plus the skips that messages speak of."""
        ends = {(stage_of(code), peer_of(code)) for row in codes for code in row if code & OP in _ACTIVATIONS}
        skips = [(min(both), max(both)) for both in ends if min(both) >= 0 and max(both) < num_stages]
        return StageGraph.chain(num_stages, skips)
