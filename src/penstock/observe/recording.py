"""Measured timelines: when each action of each rank began and ended, on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter, thread_time
from typing import Any

import torch

from penstock.batch.batch import Batch
from penstock.checks import check_types
from penstock.comm.transport import Transport
from penstock.errors import RunError
from penstock.observe.observer import StepObserver, StepView
from penstock.plan import Plan
from penstock.simulate import Timeline


class HostClock:
    """For tensors in host memory: an action has ended when its call has."""

    mark = staticmethod(perf_counter)

    def begin(self) -> None:
        """A step is about to begin."""
        self._began = thread_time()

    def processor(self) -> float | None:
        """Seconds in which this thread had a processor, since the step began."""
        return thread_time() - self._began

    def seconds(self, marks: Sequence[float]) -> list[float]:
        return list(marks)


class DeviceClock:
    """For accelerators, which are told what to do long before they do it: marks are events among their kernels.

    Before a step that is measured the host waits until the device has nothing to do, so that an event has a known time.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport, self._device = transport, transport.device

    def begin(self) -> None:
        self._transport.wait_for_device()
        self._origin = self.mark()
        self._host = perf_counter()

    def processor(self) -> float | None:
        """What the host does says nothing of the device."""
        return None

    def mark(self) -> torch.Event:
        event = torch.Event(device=self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))  # which need not be the current device
        return event

    def seconds(self, marks: Sequence[torch.Event]) -> list[float]:
        self._transport.wait_for_device()
        return [self._host + self._origin.elapsed_time(mark) / 1e3 for mark in marks]


class Recording(StepObserver):
    """Times the actions of this rank. The time that an action waits for its message is not part of it.

    What `schedule.record()` gives; `timeline`, of all ranks, is there when the block has ended.
    """

    def __init__(self, transport: Transport) -> None:
        check_types("Recording", RunError, transport=(transport, Transport))
        self.transport = transport
        host = transport.device.type == "cpu"
        self.clock: HostClock | DeviceClock = HostClock() if host else DeviceClock(transport)
        self.starts: list[Any] = []  # marks of the clock
        self.ends: list[Any] = []
        self._start: Any = None
        self._waited: Any = None  # when the last wait of the action ended
        self.processor: float | None = None  # seconds in which the rank had a processor in the step, if that is known
        self.plan: Plan | None = None
        self._timeline: Timeline | None = None

    @property
    def timeline(self) -> Timeline:
        if self._timeline is None:
            raise RunError("nothing is recorded yet; call step() in the block, and read the timeline after it")
        return self._timeline

    @property
    def busy(self) -> float:
        """Seconds in which this rank did something in the last step, and did not wait."""
        return float(sum(self.clock.seconds(self.ends)) - sum(self.clock.seconds(self.starts)))

    @property
    def span(self) -> float:
        """Seconds from the beginning of its first action to the end of its last."""
        ends, starts = self.clock.seconds(self.ends), self.clock.seconds(self.starts)
        return float(max(ends, default=0.0) - min(starts, default=0.0))

    def before_step(self, step: StepView, batch: Batch) -> bool:
        self.plan = step.plan
        self.clock.begin()
        self.starts = [self.clock.mark()] * len(step.actions)
        self.ends = list(self.starts)
        return True

    def before_action(self, at: int) -> None:
        self._waited = None
        self._start = self.clock.mark()

    def waited(self) -> None:
        self._waited = self.clock.mark()

    def after_action(self, at: int, *, failed: bool) -> None:
        self.ends[at] = self.clock.mark()
        self.starts[at] = self._start if self._waited is None else self._waited

    def after_step(self, step: StepView) -> None:
        self.processor = self.clock.processor()

    def finish(self) -> None:
        """Gather the times of all ranks, on the clock of rank 0."""
        offset = self.transport.clock_offset()
        began, ended = ([t + offset for t in self.clock.seconds(marks)] for marks in (self.starts, self.ends))
        everyone = self.transport.collectives.all_gather("times of the actions", (began, ended, self.processor))
        if self.plan is None or not self.starts:
            return
        origin = min(min(began) for began, _, _ in everyone if began)
        starts = tuple([t - origin for t in began] for began, _, _ in everyone)
        ends = tuple([t - origin for t in ended] for _, ended, _ in everyone)
        spent = tuple(seconds for _, _, seconds in everyone if seconds is not None)
        processor = spent if len(spent) == len(everyone) else None
        self._timeline = Timeline(self.plan, starts, ends, measured=True, unit="s", processor=processor)
