"""Measured timelines: when each action of each rank began and ended, on one clock."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from time import perf_counter

from penstock.comm.messages import Work
from penstock.comm.transport import Transport
from penstock.errors import RunError
from penstock.plan import Plan
from penstock.run.channel import Wait
from penstock.run.program import Call, Program
from penstock.simulate import Timeline


class Recorder:
    """Times the actions of this rank. The time that an action waits for its message is not part of it."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.waited = 0.0
        self.plan: Plan | None = None

    @property
    def busy(self) -> float:
        """Seconds in which this rank did something in the last step, and did not wait."""
        return sum(self.ends) - sum(self.starts)

    @property
    def span(self) -> float:
        """Seconds from the beginning of its first action to the end of its last."""
        return max(self.ends, default=0.0) - min(self.starts, default=0.0)

    def watched(self, program: Program, calls: Sequence[Call]) -> list[Call]:
        """The calls of a step, each of which notes its times."""
        self.plan = program.plan
        self.starts, self.ends = [0.0] * len(calls), [0.0] * len(calls)
        for channel in program.channels.values():
            channel.wait = partial(self.waiting, program.wait)
        return [partial(self.timed, at, call) for at, call in enumerate(calls)]

    def waiting(self, wait: Wait, work: Work) -> None:
        wait(work)
        self.waited = perf_counter()

    @staticmethod
    def unwatch(program: Program) -> None:
        for channel in program.channels.values():
            channel.wait = program.wait

    def timed(self, at: int, call: Call) -> None:
        self.waited = 0.0
        start = perf_counter()
        call()
        self.ends[at] = perf_counter()
        self.starts[at] = max(start, self.waited)


class Recording:
    """What `schedule.record()` gives; `timeline` is there when the block has ended."""

    def __init__(self) -> None:
        self._timeline: Timeline | None = None

    @property
    def timeline(self) -> Timeline:
        if self._timeline is None:
            raise RunError("nothing is recorded yet; call step() in the block, and read the timeline after it")
        return self._timeline

    def finish(self, recorder: Recorder, transport: Transport) -> None:
        """Gather the times of all ranks, on the clock of rank 0."""
        offset = transport.clock_offset()
        mine = {"starts": [t + offset for t in recorder.starts], "ends": [t + offset for t in recorder.ends]}
        everyone = [json.loads(post) for post in transport.gather("times of the actions", json.dumps(mine).encode())]
        if recorder.plan is None or not recorder.starts:
            return
        origin = min(min(times["starts"]) for times in everyone if times["starts"])
        starts = tuple([t - origin for t in times["starts"]] for times in everyone)
        ends = tuple([t - origin for t in times["ends"]] for times in everyone)
        self._timeline = Timeline(recorder.plan, starts, ends, measured=True, unit="s")
