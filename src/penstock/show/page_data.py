"""Data of a timeline for the HTML page: columns of numbers, small enough for 100,000 spans.

An action is a *key* (an index into `keys`) and a microbatch. What an action needs is stated over keys too, as in
`penstock.plan.dependencies`, so the page finds what any action needs, and what needs it, without a list of all edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import floor, log10

from penstock.plan import Op, Plan
from penstock.plan.actions import KEY, OP, PEER_SHIFT, microbatch_of, parts, stage_of, with_op
from penstock.plan.ops import ROWS
from penstock.show.colors import paint, rank_colour, shades
from penstock.show.summary import holds
from penstock.show.timeline_rows import Bar, Picture
from penstock.simulate import Timeline


def timeline_data(name: str, timeline: Timeline) -> dict[str, object]:
    """Everything that the page draws of one timeline, ready for JSON. Times count from its first start.

    ``rows``      one a rank, then, where a plan copies, one a copy engine: `k` key, `m` microbatch, `s` start, `e` end of
                  each box, by start; `pair` the second action of an overlapped one: its place -> [key, microbatch]
    ``messages``  `f` from rank, `t` to rank, `a` key of the send, `b` key of the receive, `m`, `s`, `e`
    ``memory``    one a rank: [time, held, time, held, ..]
    """
    plan = timeline.plan
    keys = _Keys(plan)
    picture = Picture.of(timeline)
    # Decimal places: nine digits of the longest time.
    digits = 9 - floor(log10(picture.length)) if picture.length > 0 else 9

    def at(time: float) -> float:
        return round(time - picture.start, digits)

    return {
        "name": name,
        "schedule": plan.name,
        "unit": timeline.unit,
        "measured": timeline.measured,
        "length": round(picture.length, digits),
        "microbatches": plan.num_microbatches,
        "stages": [list(plan.placement.stages_of(rank)) for rank in range(plan.num_ranks)],
        "curves": [rank_colour(rank, plan.num_ranks) for rank in range(plan.num_ranks)],
        "rows": [_row(bars, keys, at) for bars in (*picture.ranks, *picture.copies)],
        "messages": _messages(timeline, keys, at),
        "memory": [_curve((at(time), held) for time, held in curve) for curve in timeline.memory if holds(timeline)],
        "keys": list(keys.listed()),
        "needs": keys.needs(),
    }


class _Keys:
    """Numbers for keys, in the order in which they are met."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.numbers: dict[int, int] = {}

    def number(self, code: int) -> int:
        return self.numbers.setdefault(code & KEY, len(self.numbers))

    def needs(self) -> list[list[int]]:
        """For each key the keys of what it needs, as far as they are known."""
        needs = self.plan.rules.needs
        return [[self.numbers[need] for need in needs(key) if need in self.numbers] for key in self.numbers]

    def listed(self) -> Iterator[dict[str, object]]:
        """Each key as the page shows it: its kind, its stage, its colours; -1 is none.

        Each B brings the I that others may need with it; `whole` of that I is the key of the B that stands for it.
        """
        whole = {
            with_op(key, halves[0]): number for key, number in self.numbers.items() if (halves := ROWS[key & OP].halves)
        }
        for half in whole:
            self.number(half)
        shade = shades(self.plan)
        for key in self.numbers:
            op, stage = Op(key & OP), stage_of(key)
            yield {
                "op": op.name,
                "word": op.row.word,
                "letter": op.row.letter,
                "stage": stage,
                "peer": (key >> PEER_SHIFT) - 1,
                "counted": op.has_microbatch,
                "sends": op.row.sends,
                **paint(op, *shade[stage])._asdict(),
                "whole": whole.get(key, -1),
            }


def _row(bars: Iterable[Bar], keys: _Keys, at: Callable[[float], float]) -> dict[str, object]:
    row = sorted((at(start), at(end), place, parts(code)) for place, (code, start, end) in enumerate(bars))
    seconds = {place: split[1] for place, (*_, split) in enumerate(row) if len(split) > 1}
    return {
        "k": [keys.number(split[0]) for *_, split in row],
        "m": [microbatch_of(split[0]) for *_, split in row],
        "s": [start for start, *_ in row],
        "e": [end for _, end, *_ in row],
        "pair": {place: [keys.number(code), microbatch_of(code)] for place, code in seconds.items()},
    }


def _curve(levels: Iterable[tuple[float, float]]) -> list[float]:
    """Return the memory curve without dips of zero length, between an action that frees and one that allocates.

    >>> _curve([(0, 0), (0, 2), (5, 1), (5, 2), (6, 1)])
    [0, 0, 0, 2, 6, 1]
    """
    kept: list[tuple[float, float]] = []
    for time, held in levels:
        if len(kept) > 1 and kept[-1][0] == time and kept[-1][1] <= held:
            kept.pop()
        if not kept or kept[-1][1] != held:
            kept.append((time, held))
    return [number for level in kept for number in level]


def _messages(timeline: Timeline, keys: _Keys, at: Callable[[float], float]) -> dict[str, list[object]]:
    rows = []
    for message in sorted(timeline.messages(), key=lambda message: message.posted):
        send, recv = message.send.code, message.recv.code
        ends = message.sender, message.receiver, keys.number(send), keys.number(recv), microbatch_of(send)
        rows.append((*ends, at(message.posted), at(message.arrived)))
    return {name: [row[place] for row in rows] for place, name in enumerate("ftabmse")}
