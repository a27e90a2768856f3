"""What torch's profiler saw of some steps on all ranks, in one file, with the planned actions beside the kernels.

    with penstock.train.traced(pipe, "trace.json"):
        pipe.step(tokens, target=labels)

Every rank enters it. Open the file in https://ui.perfetto.dev or chrome://tracing: each rank has its threads and devices, in
which every action of the plan is a range (penstock:0F1) around its operators and kernels, and below them the same step as it
was planned. All times are on the clock of rank 0.
"""

from __future__ import annotations

import json
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch

from penstock.errors import PenstockError
from penstock.front import Pipeline
from penstock.front.spread import receive_from, send_to
from penstock.show.chrome_trace import Event, to_trace
from penstock.simulate import simulate

_ANCHOR: Final = "penstock:anchor"  # ranges whose times are known on both clocks
_ANCHORS: Final = 8
_PLACES: Final = 1000  # processes and devices of a rank, in the file
_PLANNED: Final = "planned"  # the one of them that has the plan


@contextmanager
def traced(pipe: Pipeline, file: str | Path) -> Iterator[torch.profiler.profile]:
    """Profile the steps inside on every rank, and write what all of them saw into one file.

        with penstock.train.traced(pipe, "trace.json") as profiler:
            pipe.step(tokens, target=labels)

    What comes is torch's profiler of this rank. With data-parallel replicas each pipeline writes a file of its own, the
    second one trace.replica1.json.
    """
    known = {name.lower(): kind for name, kind in torch.profiler.ProfilerActivity.__members__.items()}
    seen = {known["cpu"], known.get(pipe.transport.device.type, known["cpu"])}
    with torch.profiler.profile(activities=seen) as profiler:
        anchors = [_anchor() for _ in range(_ANCHORS)]
        yield profiler
    offset = pipe.transport.clock_offset()
    quickest = min(range(_ANCHORS), key=lambda number: anchors[number][1])
    events = _seen(profiler)
    times = sorted(event["ts"] for event in events if event.get("name") == _ANCHOR)
    if len(times) != _ANCHORS:
        raise PenstockError("the profiler gave nothing back: another profiler is running in this program; end it first")
    shift = (anchors[quickest][0] + offset) * 1e6 - times[quickest]  # to microseconds of rank 0's clock
    mine = [event | {"ts": event["ts"] + shift} if "ts" in event else event for event in events]
    if pipe.rank > 0:
        packed = zlib.compress(json.dumps(mine).encode())
        send_to(pipe.transport, [0], torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(pipe.transport.device))
        return
    others = (receive_from(pipe.transport, rank) for rank in range(1, pipe.num_ranks))
    ranks = [mine, *(json.loads(zlib.decompress(bytes(other.cpu().numpy()))) for other in others)]
    place = Path(file)
    place = place if pipe.replica == 0 else place.with_suffix(f".replica{pipe.replica}{place.suffix}")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(merged(pipe, ranks), separators=(",", ":")), encoding="utf-8")


def _anchor() -> tuple[float, float]:
    """When a range of no length was, and how long that took to find out."""
    before = time.perf_counter()
    with torch.profiler.record_function(_ANCHOR):
        pass
    return before, time.perf_counter() - before


def _seen(profiler: torch.profiler.profile) -> list[Event]:
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return list(json.loads(file.read_text(encoding="utf-8"))["traceEvents"])


def merged(pipe: Pipeline, ranks: list[list[Event]]) -> dict[str, object]:
    """The events of all ranks and those that were planned, as one trace that begins at 0."""
    begin = min((event["ts"] for events in ranks for event in events if "ts" in event), default=0.0)
    for number, (start, end) in enumerate(_steps(pipe, ranks)):
        for rank, event in _planned(pipe, number, start, end - start):
            ranks[rank].append(event)
    found = [moved for rank, events in enumerate(ranks) for moved in _of_rank(rank, events, begin)]
    return {"traceEvents": found, "displayTimeUnit": "ms", "otherData": {"schedule": pipe.plan.name, "by": "penstock"}}


def _of_rank(rank: int, events: list[Event], begin: float) -> Iterator[Event]:
    """Processes, devices and arrows get numbers that no other rank has; the names say whose they are."""
    places: dict[object, int] = {}
    for event in events:
        place = event.get("pid", 0)
        pid = rank * _PLACES + places.setdefault(place, len(places))
        moved = event | {"pid": pid}
        if "ts" in event:
            moved["ts"] = round(event["ts"] - begin, 3)
        if "id" in event and place != _PLANNED:  # what was planned has arrows from rank to rank
            moved["id"] = f"{rank}:{event['id']}"
        if event.get("name") == "process_name":
            moved["args"] = {"name": f"rank {rank}: {event['args']['name']}"}
        elif event.get("name") == "process_sort_index":
            moved["args"] = {"sort_index": pid}
        yield moved


def _steps(pipe: Pipeline, ranks: list[list[Event]]) -> list[tuple[float, float]]:
    """When each training step began and ended, by the ranges of its actions."""
    found: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for codes, events in zip(pipe.schedule.lowered_plan().codes, ranks, strict=True):
        ranges = sorted(
            (event["ts"], event["ts"] + event.get("dur", 0))
            for event in events
            if event.get("ph") == "X" and event.get("cat") == "user_annotation"
            if event["name"] != _ANCHOR and event["name"].startswith("penstock:")
        )
        for number in range(len(ranges) // max(len(codes), 1)):
            step = ranges[number * len(codes) : (number + 1) * len(codes)]
            found[number].append((step[0][0], max(end for _, end in step)))
    return [(min(start for start, _ in spans), max(end for _, end in spans)) for spans in found.values()]


def _planned(pipe: Pipeline, step: int, start: float, length: float) -> Iterator[tuple[int, Event]]:
    """The step as it was planned, each event with its rank; drawn as long as it took, if nothing was measured before that says
    how long it takes."""
    timed = pipe.timeline if pipe.choice is not None and pipe.choice.is_timed else None
    events = to_trace(timed or simulate(pipe.plan))["traceEvents"]
    whole = max((event["ts"] + event.get("dur", 0) for event in events if "ts" in event), default=0.0)
    scale = 1.0 if timed or not whole else length / whole
    for event in events:
        if step and event["ph"] == "M":  # names, which the first step has said
            continue
        times = {key: begin + event[key] * scale for key, begin in (("ts", start), ("dur", 0.0)) if key in event}
        name = {"args": {"name": _PLANNED}} if event["name"] == "process_name" else {}
        arrow = {"id": f"planned:{step}:{event['id']}"} if "id" in event else {}
        yield event["pid"], {**event, "pid": _PLANNED, **times, **name, **arrow}
