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
from penstock.show.trace import Event, to_trace
from penstock.simulate import simulate

_ANCHOR: Final = "penstock:anchor"  # ranges whose times are known on both clocks
_ANCHORS: Final = 8
_ACTION: Final = "penstock:"
_PLACES: Final = 1000  # processes and devices of a rank, in the file


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
    steps = _steps(pipe, ranks)
    begin = min((event["ts"] for events in ranks for event in events if "ts" in event), default=0.0)
    found = [moved for rank, events in enumerate(ranks) for moved in _of_rank(rank, events, begin)]
    for number, (start, end) in enumerate(steps):
        found += _planned(pipe, number, start - begin, end - start)
    return {"traceEvents": found, "displayTimeUnit": "ms", "otherData": {"schedule": pipe.plan.name, "by": "penstock"}}


def _of_rank(rank: int, events: list[Event], begin: float) -> Iterator[Event]:
    """Processes, devices and arrows get numbers that no other rank has; the names say whose they are."""
    places: dict[object, int] = {}
    for event in events:
        pid = places.setdefault(event.get("pid", 0), len(places))
        name = f"rank {rank}: {event.get('args', {}).get('name', '')}"
        yield _moved(event, rank * 2 * _PLACES + pid, f"{rank}", name=name, start=-begin)


def _moved(event: Event, pid: int, group: str, *, name: str, start: float, scale: float = 1.0) -> Event:
    """An event in another place: of a process with this number and name, at another time, with arrows of its own group."""
    moved = event | {"pid": pid}
    if "ts" in event:
        moved["ts"] = round(start + event["ts"] * scale, 3)
    if "dur" in event:
        moved["dur"] = round(event["dur"] * scale, 3)
    if "id" in event:
        moved["id"] = f"{group}:{event['id']}"
    if event.get("name") == "process_name":
        moved["args"] = {"name": name}
    elif event.get("name") == "process_sort_index":
        moved["args"] = {"sort_index": pid}
    return moved


def _steps(pipe: Pipeline, ranks: list[list[Event]]) -> list[tuple[float, float]]:
    """When each training step began and ended, by the ranges of its actions."""
    found: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for codes, events in zip(pipe.schedule.lowered_plan().codes, ranks, strict=True):
        ranges = sorted(
            (event["ts"], event["ts"] + event.get("dur", 0))
            for event in events
            if event.get("ph") == "X"
            and str(event.get("name")).startswith(_ACTION)
            and event["name"] != _ANCHOR
            and event.get("cat") == "user_annotation"
        )
        for number in range(len(ranges) // max(len(codes), 1)):
            step = ranges[number * len(codes) : (number + 1) * len(codes)]
            found[number].append((step[0][0], max(end for _, end in step)))
    return [(min(start for start, _ in spans), max(end for _, end in spans)) for spans in found.values()]


def _planned(pipe: Pipeline, step: int, start: float, length: float) -> Iterator[Event]:
    """The step as it was planned; drawn as long as it took, if nothing was measured before that says how long it takes."""
    timed = pipe.choice is not None and pipe.choice.is_timed and pipe.timeline is not None
    timeline = pipe.timeline if timed and pipe.timeline is not None else simulate(pipe.plan)
    events = to_trace(timeline)["traceEvents"]
    whole = max((event["ts"] + event.get("dur", 0) for event in events if "ts" in event), default=0.0)
    scale = 1.0 if timed or not whole else length / whole
    for event in events:
        if step == 0 or event["ph"] != "M":
            rank = event["pid"]
            pid, name = rank * 2 * _PLACES + _PLACES, f"rank {rank}: planned"
            yield _moved(event, pid, f"planned:{step}", name=name, start=start, scale=scale)
