"""A timeline as a Chrome trace: open it in https://ui.perfetto.dev or chrome://tracing.

A rank is a process. Its compute actions are on one thread, what its copy engine does is on another; messages are on
threads of their own, as many as are under way at a time, because slices of one thread may not cross. An arrow leads from
each send to its receive (in a plan without messages: from each action to the one on another rank that needs it), and a
counter shows the memory held.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any, Final

from penstock.checks import check_types
from penstock.errors import PlanError
from penstock.plan import AnyAction, Op, Overlap, Plan
from penstock.plan.actions import KEY, MICROBATCH_FIELD, OP, parts, unpack, with_op
from penstock.plan.file_io import write_text
from penstock.plan.ops import COMPUTES, TRAINING, doing
from penstock.show.timeline_rows import Picture
from penstock.simulate import Timeline, simulate

_MICROSECONDS: Final = {"s": 1e6, "ms": 1e3, "us": 1.0, "µs": 1.0, "ns": 1e-3}
_UNITLESS: Final = 1e3  # a unit of a simulation is drawn as a millisecond
_COMPUTE, _COPIES, _SENDS, _RECEIVES = 0, 1, 100, 10_000  # the first thread of each kind
_SHORTEST: Final = 1e-3  # a nanosecond: arrows need something to be bound to

Event = dict[str, Any]


def to_trace(shown: Timeline | Plan) -> dict[str, Any]:
    """The trace as one JSON-ready object; a plan is timed with unit costs.

    >>> from penstock.schedules import get_schedule
    >>> sorted({event["ph"] for event in to_trace(get_schedule("1f1b")(2, 2))["traceEvents"]})
    ['C', 'M', 'X', 'f', 's']
    """
    check_types("to_trace", PlanError, shown=(shown, Timeline | Plan))
    timeline = simulate(shown) if isinstance(shown, Plan) else shown
    return {
        "traceEvents": list(_Trace(timeline).events()),
        "displayTimeUnit": "ms",
        "otherData": {"schedule": timeline.plan.name, "unit": timeline.unit or "1 = 1 ms", "by": "penstock"},
    }


def dump_trace(shown: Timeline | Plan, path: str | PathLike[str]) -> None:
    """Write the trace as a JSON file.

    dump_trace(timeline, "trace.json")
    """
    check_types("dump_trace", PlanError, path=(path, str | PathLike))
    write_text(path, json.dumps(to_trace(shown), separators=(",", ":")), PlanError)


class _Trace:
    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.picture = Picture.of(timeline)
        self.scale = _MICROSECONDS.get(timeline.unit, _UNITLESS)
        self.lanes: dict[tuple[int, int], list[float]] = {}  # (rank, kind) -> when each of its threads is free again

    def events(self) -> Iterator[Event]:
        for rank in range(self.timeline.plan.num_ranks):
            yield _named("process_name", rank, f"rank {rank}")
            yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
            rows = ("compute", _COMPUTE, self.picture.ranks), ("copies", _COPIES, self.picture.copies)
            for name, thread, bars in rows if self.picture.copies else rows[:1]:
                yield _named("thread_name", rank, name, thread)
                for code, start, end in bars[rank]:
                    yield self.slice(rank, thread, unpack(code), begin=self.at(start), end=self.at(end))
            for time, held in self.timeline.memory[rank] if self.timeline.memory else ():
                yield {"ph": "C", "name": "memory", "pid": rank, "ts": self.at(time), "args": {"held": held}}
        yield from self.messages() if self.timeline.plan.is_lowered else self.dependencies()

    def at(self, time: float) -> float:
        return round((time - self.picture.start) * self.scale, 3)

    def slice(self, rank: int, thread: int, action: AnyAction, *, begin: float, end: float) -> Event:
        return {
            "ph": "X",
            "name": str(action),
            "cat": "overlap" if isinstance(action, Overlap) else action.op.row.word,
            "pid": rank,
            "tid": thread,
            "ts": begin,
            "dur": round(max(end - begin, 0.0), 3),
            "args": _details(action),
        }

    def messages(self) -> Iterator[Event]:
        """Both ends of every message and the arrow between them."""
        posted = sorted(self.timeline.messages(), key=lambda message: message.posted)
        for number, message in enumerate(posted):
            leaves = self.at(message.posted)
            arrives = max(self.at(message.arrived), round(leaves + _SHORTEST, 3))
            opens = min(self.at(message.opened), arrives - _SHORTEST)
            sent, received = (message.sender, _SENDS, message.send), (message.receiver, _RECEIVES, message.recv)
            ends = []
            for (rank, kind, action), begin in ((sent, leaves), (received, opens)):
                thread = self.lane(rank, kind, begin, arrives)
                yield self.slice(rank, thread, action, begin=begin, end=arrives)
                ends.append((rank, thread, max(leaves, begin)))
            yield from _arrow(number, message.send.code & OP in TRAINING, *ends)
        for (rank, kind), lanes in self.lanes.items():
            for thread in range(kind, kind + len(lanes)):
                yield _named("thread_name", rank, "sends" if kind == _SENDS else "receives", thread)

    def lane(self, rank: int, kind: int, begin: float, end: float) -> int:
        """A thread of this kind that is free from `begin` on, and busy until `end`."""
        lanes = self.lanes.setdefault((rank, kind), [])
        number = next((number for number, free in enumerate(lanes) if free <= begin), len(lanes))
        lanes[number : number + 1] = [end]
        return kind + number

    def dependencies(self) -> Iterator[Event]:
        """Arrows between the compute actions of different ranks."""
        plan, number = self.timeline.plan, 0
        where = {part: (rank, start, end) for rank, code, start, end in self.timeline.every() for part in parts(code)}
        for part, (rank, start, _) in where.items():
            if part & OP not in COMPUTES:
                continue
            for need in plan.rules.needs(part & KEY):
                microbatch = part & MICROBATCH_FIELD
                doers = (where.get(with_op(need, op) | microbatch) for op in doing(Op(need & OP)))
                source = next(filter(None, doers), None)
                if source is not None and source[0] != rank:
                    number += 1
                    begin, end = self.at(source[1]), self.at(source[2])
                    leaves = source[0], _COMPUTE, round(max(begin, end - _SHORTEST), 3)
                    yield from _arrow(number, need & OP != Op.F, leaves, (rank, _COMPUTE, self.at(start)))


_Place = tuple[int, int, float]  # process, thread, time


def _arrow(number: int, is_gradient: bool, source: _Place, target: _Place) -> Iterator[Event]:
    for phase, (pid, tid, ts), more in (("s", source, {}), ("f", target, {"bp": "e"})):
        name = "gradient" if is_gradient else "activation"
        yield {"ph": phase, "id": number, "name": name, "cat": "message", "pid": pid, "tid": tid, "ts": ts, **more}


def _named(what: str, rank: int, name: str, thread: int | None = None) -> Event:
    event: Event = {"ph": "M", "name": what, "pid": rank, "args": {"name": name}}
    return event if thread is None else event | {"tid": thread}


def _details(action: AnyAction) -> Mapping[str, object]:
    if isinstance(action, Overlap):
        return {"first": str(action.first), "second": str(action.second)}
    return {"stage": action.stage} | ({} if action.microbatch is None else {"microbatch": action.microbatch})
