"""Whereabouts: where each rank of a running job is, as a table for whoever looks at a job that is stuck or slow.

>>> print(table([Whereabouts(0, step=7, action="0B2", at=12, of=40, doing="waits", peer=1, seconds=3.25), None], num_ranks=2))
rank  step  action  at        does              for
0     7     0B2     12 of 40  waits for rank 1  3.2 s
1     -     -       -         does not answer   -
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from penstock.errors import PenstockError
from penstock.health.decoding import loads

_MOST_RANKS = 1 << 16  # the table has a row for each


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where one rank is."""

    rank: int
    step: int = 0  # the current one, or the last
    action: str = ""  # of the plan; "" between steps
    at: int = 0  # its place in the plan of this rank
    of: int = 0
    doing: str = ""  # "computes", "waits", or what it does outside of actions
    peer: int | None = None  # whom it waits for
    seconds: float = 0.0  # since it came there, as far as somebody looked
    place: str = ""  # in the program: file, line and function

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Whereabouts:
        """What `encode` gave; anything else is an error."""
        try:
            found = loads(data, cls)
            for name, value in asdict(found).items():
                wrong = isinstance(value, str) and not value.isprintable()  # a terminal would obey it
                if wrong or (isinstance(value, int) and not 0 <= value < (_MOST_RANKS if name == "rank" else 1 << 62)):
                    raise ValueError(f"{name}: {value!r:.60}")
            return found
        except (ValueError, TypeError, RecursionError) as error:
            raise PenstockError(f"this does not say where a rank is: {error}") from error

    def row(self) -> tuple[str, str, str, str, str, str]:
        does = self.doing or "computes"
        if self.peer is not None:
            does += f" for rank {self.peer}"
        elif self.place:
            does += f" ({self.place})"
        at = f"{self.at} of {self.of}" if self.of else "-"
        return str(self.rank), str(self.step), self.action or "-", at, does, f"{self.seconds:.1f} s"


def table(found: Sequence[Whereabouts | None], *, num_ranks: int) -> str:
    """A row for each rank; one of which nothing is known does not answer."""
    known = {one.rank: one for one in found if one is not None}
    rows = [("rank", "step", "action", "at", "does", "for")] + [
        known[rank].row() if rank in known else (str(rank), "-", "-", "-", "does not answer", "-")
        for rank in range(num_ranks)
    ]
    return "\n".join(aligned(rows))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, in which each column is as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
