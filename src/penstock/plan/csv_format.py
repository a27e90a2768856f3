"""Plans as text: CSV files that torch reads and writes too, and a table for people. Load and dump are inverses.

A file has one row a rank and one action a cell; an empty cell is an idle slot. The compute-only and the lowered form
look alike: a lowered plan simply holds its messages as well.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from io import StringIO
from os import PathLike

from penstock.checks import check_types
from penstock.errors import ParseError, PlanError
from penstock.plan.action_positions import STEP
from penstock.plan.actions import KEY, OP, AnyAction, microbatch_of, pack, parse, parts, peer_of, stage_of, text
from penstock.plan.file_io import read_text, write_text
from penstock.plan.ops import COMPUTES, COUNTED, MESSAGES, OPS, TRAINING
from penstock.plan.placement import Placement
from penstock.plan.plan import Plan
from penstock.plan.stage_graph import StageGraph

_ACTIVATIONS = MESSAGES - TRAINING
LIMIT = 16_000_000  # bytes of a plan file: about two million actions
_Cell = AnyAction | str | int | None


def dumps(plan: Plan) -> str:
    """The plan as CSV text.

    dumps(get_schedule("1f1b")(2, 4))
    """
    check_types("dumps", PlanError, plan=(plan, Plan))
    return "".join(",".join(map(text, codes)) + "\n" for codes in plan.codes)


def dump(plan: Plan, path: str | PathLike[str]) -> None:
    """Write the plan as a CSV file.

    dump(get_schedule("1f1b")(2, 4), "plan.csv")
    """
    check_types("dump", PlanError, path=(path, str | PathLike))
    write_text(path, dumps(plan), PlanError)


def load(path: str | PathLike[str], *, limit: int = LIMIT, **known: object) -> Plan:
    """Read a CSV file, torch's or penstock's own.

        load("plan.csv")

    A file of more than `limit` bytes is refused: reading takes about thirty times its size in memory.

    `known` is what the file cannot tell: ``placement``, ``graph``, ``num_microbatches``, ``name``; by default they are
    read off the actions, as in `Plan.of`.
    """
    check_types("load", PlanError, path=(path, str | PathLike), limit=(limit, int))
    hint = ". If it is a plan, load(path, limit={size}) reads it, and takes about thirty times its size in memory"
    string = read_text(path, ParseError, limit=limit, hint=hint)
    return loads(string, source=str(path), **known)


def loads(string: str, *, source: str = "the text", **known: object) -> Plan:
    """Read CSV text. `source` is named in errors.

    loads("0F0,0B0\\n1F0,1B0")
    """
    check_types("loads", PlanError, string=(string, str), source=(source, str))
    try:
        rows = list(csv.reader(StringIO(string, newline="")))
    except csv.Error as error:
        raise ParseError(f"{source} is no CSV: {error}; expected one row a rank, such as 0F0,0F1,0B0,0B1") from None
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    if not rows:
        raise ParseError(f"{source} holds no action; expected one row a rank, such as 0F0,0F1,0B0,0B1")
    return Reader(source, **known).plan([[cell.strip() for cell in row] for row in rows])  # type: ignore[arg-type]


@dataclass
class Reader:
    """Makes a plan of rows of cells, and reads off them what is not known; see `Plan.of`.

    Reader("plan.csv", num_microbatches=1).plan([["0F0", "0B0"]])

    Errors name the source, the row and the column, counted from 1.
    """

    source: str = ""
    placement: Placement | None = None
    graph: StageGraph | None = None
    num_microbatches: int | None = None
    name: str = ""
    keys: dict[str, int] = field(init=False, default_factory=dict)  # the text before the microbatch -> the key
    seen: dict[int, tuple[int, int]] = field(init=False, default_factory=dict)  # action -> its first row and column
    # Those that may stand twice, and do.
    again: list[tuple[int, tuple[int, int]]] = field(init=False, default_factory=list)

    def plan(self, rows: Sequence[Iterable[_Cell]]) -> Plan:
        whole = self.source or "the plan"
        if self.placement is not None and len(rows) != (count := self.placement.num_ranks):
            wrong = f"{self.where(count + 1, 1)}: a row too many" if rows[count:] else f"{whole} has {len(rows)} rows"
            raise ParseError(f"{wrong}; expected {count}, one for each rank")
        codes = tuple(tuple(self.row(number, cells)) for number, cells in enumerate(rows, 1))
        if self.placement is None and () in codes:
            empty = self.where(codes.index(()) + 1, 1)
            raise ParseError(f"{empty}: the row is empty; expected every rank to hold a stage")
        homes: dict[int, tuple[int, int]] = {}  # stage -> the row and column that first put it on a rank
        for code, place in self.seen.items():
            if code & OP in COMPUTES:
                homes.setdefault(stage_of(code), place)
        try:
            placement = self.placement or self.placement_of(homes)
        except PlanError as error:
            raise ParseError(f"{whole}: {error}") from None
        self.check(placement, homes)
        ends = {(stage_of(code), peer_of(code)) for code in self.seen if code & OP in _ACTIVATIONS}
        edges = [(min(both), max(both)) for both in ends]
        graph = self.graph or StageGraph.chain(placement.num_stages, edges)  # a chain, plus the skips of messages
        num_microbatches = self.num_microbatches or max(map(microbatch_of, self.seen), default=0) + 1
        return Plan(placement, graph, num_microbatches, codes, self.name)

    def where(self, row: int, column: int) -> str:
        return f"{self.source + ', ' if self.source else ''}row {row}, column {column}"

    def row(self, row: int, cells: Iterable[_Cell]) -> Iterator[int]:
        for column, cell in enumerate(cells, 1):
            if cell is None or cell == "":
                continue
            try:
                code = self.code(cell)
                for part in parts(code):
                    first = self.seen.setdefault(part, (row, column))
                    if first == (row, column):
                        continue
                    self.again.append((part, (row, column)))
                    if part & OP in COUNTED:
                        twice = f"stands twice, first in {self.where(*first)}; expected each action once"
                        raise ParseError(f"{text(part)} {twice}")
            except ParseError as error:
                raise ParseError(f"{self.where(row, column)}: {error}") from None
            yield code

    def code(self, cell: AnyAction | str | int) -> int:
        """Parse a cell. One that differs from an earlier cell in its microbatch alone needs no second look."""
        if isinstance(cell, int):
            if cell < 0 or any(part & OP not in OPS for part in parts(cell)):
                raise ParseError(f"{cell} is no packed action; see penstock.plan.actions")
            return cell
        written = str(cell)
        head = written.rstrip("0123456789")
        digits = written[len(head) :]
        key = self.keys.get(head)
        if key is not None and 0 < len(digits) < 8:
            return key + int(digits) * STEP
        code = pack(parse(written))
        if code & OP in COUNTED and text(code) == written and head[-1].isalpha():  # its number is no peer
            self.keys[head] = code & KEY
        return code

    def placement_of(self, homes: dict[int, tuple[int, int]]) -> Placement:
        """A stage sits where it computes."""
        num_stages = self.graph.num_stages if self.graph else max(homes, default=0) + 1
        missing = next((stage for stage in range(num_stages) if stage not in homes), None)
        if missing is not None:
            raise PlanError(f"no rank computes stage {missing}; expected every stage from 0 to the highest")
        return Placement.of([homes[stage][0] - 1 for stage in range(num_stages)])

    def check(self, placement: Placement, homes: dict[int, tuple[int, int]]) -> None:
        """Hold every action against the sizes and the placement, which are known only when everything is read."""
        num_stages, limit = placement.num_stages, self.num_microbatches
        for code, (row, column) in (*self.seen.items(), *self.again):
            low, high = sorted((stage_of(code), peer_of(code)))
            wrong = None
            if low < 0 or high >= num_stages:
                what = f"a message between the stages {low} and {high}" if low < high else "out of range"
                wrong = f"is {what}; expected stages 0 to {num_stages - 1}"
            elif limit is not None and microbatch_of(code) >= limit:
                wrong = f"is out of range; expected microbatches 0 to {limit - 1}"
            elif (home := placement.rank_of(stage_of(code))) != row - 1:
                if self.placement:
                    wrong = f"is on rank {row - 1}; expected it on rank {home}"
                elif code & OP in COMPUTES:
                    wrong = (
                        f"puts stage {low} on rank {row - 1}, but {self.where(*homes[low])} puts it on rank {home}; "
                        "expected each stage on one rank"
                    )
            if wrong:
                raise ParseError(f"{self.where(row, column)}: {text(code)} {wrong}")
