"""The trace: every action once, arrows that are bound to what they join, slices of a thread that do not cross."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from penstock.lower import Ahead, Early, JustInTime, lower
from penstock.plan import Plan
from penstock.schedules import get_schedule
from penstock.show import dump_trace, to_trace
from penstock.simulate import Costs, Timeline, simulate

Event = dict[str, Any]


def by_phase(shown: Timeline | Plan) -> dict[str, list[Event]]:
    found = defaultdict(list)
    for event in to_trace(shown)["traceEvents"]:
        found[event["ph"]].append(event)
    return found


def inside(event: Event, slices: list[Event]) -> Event:
    """The slice that an arrow's end is bound to: the innermost on its thread around its time."""
    around = [
        s
        for s in slices
        if (s["pid"], s["tid"]) == (event["pid"], event["tid"]) and s["ts"] <= event["ts"] <= s["ts"] + s["dur"]
    ]
    assert around, event
    return max(around, key=lambda s: s["ts"])


def check_threads(slices: list[Event]) -> None:
    threads = defaultdict(list)
    for event in slices:
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        spans.sort()
        assert all(end <= start + 1e-6 for (_, end), (start, _) in itertools.pairwise(spans))


def test_copies_are_on_a_thread_of_their_own(copied: Plan) -> None:
    events = by_phase(copied)
    check_threads(events["X"])
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events["M"] if e["name"] == "thread_name"}
    for event in events["X"]:
        expected = "copies" if event["cat"] in ("offload", "load") else "compute"
        assert threads[event["pid"], event["tid"]] == expected


@pytest.mark.parametrize("policy", [Early(), Ahead(1), JustInTime()], ids=["early", "ahead", "just in time"])
@pytest.mark.parametrize("latency", [0.0, 0.5, 3.0])
def test_arrows_lead_from_each_send_to_its_receive(policy, latency: float) -> None:
    plan = lower(get_schedule("1f1b")(4, 6), receives=policy)
    timeline = simulate(plan, Costs.per_rank(num_stages=4, latency=latency))
    events = by_phase(timeline)
    check_threads(events["X"])
    assert sorted(e["name"] for e in events["X"]) == sorted(str(a) for rank in range(4) for a in plan.actions(rank))
    starts, ends = ({e["id"]: e for e in events[phase]} for phase in "sf")
    messages = {(str(m.send), str(m.recv)): m for m in timeline.messages()}
    assert len(starts) == len(ends) == len(messages)
    for number, start in starts.items():
        end = ends[number]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])
        assert end["bp"] == "e"
        assert end["ts"] >= start["ts"]
        send, recv = inside(start, events["X"]), inside(end, events["X"])
        message = messages.pop((send["name"], recv["name"]))
        assert (start["pid"], end["pid"]) == (message.sender, message.receiver)
    assert not messages


def test_plans_without_messages_have_arrows_between_ranks(overlapped: Plan) -> None:
    for plan in (get_schedule("zbv")(4, 6), overlapped):
        events = by_phase(plan)
        check_threads(events["X"])
        ends = {e["id"]: e for e in events["f"]}
        assert len(ends) == len(events["s"]) > 0
        for start in events["s"]:
            end = ends[start["id"]]
            assert start["pid"] != end["pid"]
            inside(start, events["X"])
            inside(end, events["X"])


def test_a_process_a_rank_and_a_counter_of_its_memory() -> None:
    timeline = simulate(get_schedule("1f1b")(4, 8))
    events = by_phase(timeline)
    names = {e["pid"]: e["args"]["name"] for e in events["M"] if e["name"] == "process_name"}
    assert names == {rank: f"rank {rank}" for rank in range(4)}
    assert {e["pid"] for e in events["X"]} == {0, 1, 2, 3}
    peaks = [max(e["args"]["held"] for e in events["C"] if e["pid"] == rank) for rank in range(4)]
    assert peaks == list(timeline.peak_memory)


def test_times_are_microseconds(lowered: Timeline, tmp_path: Path) -> None:
    dump_trace(lowered, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    computed = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["name"] == "0F0"]
    assert [(e["ts"], e["dur"]) for e in computed] == [(0.0, 1e6)]
    assert max(e["ts"] + e["dur"] for e in trace["traceEvents"] if e["ph"] == "X") == pytest.approx(
        max(max(row) for row in lowered.ends) * 1e6
    )
    assert all(e["ts"] >= 0 for e in trace["traceEvents"] if "ts" in e)
