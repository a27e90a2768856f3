"""Observers that the runner adds by itself: profiler ranges, and a wait for the device after each action."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.batch.batch import Batch
from penstock.comm.transport import Transport
from penstock.observe.observer import StepObserver, StepView
from penstock.plan import AnyAction

profiler_runs = torch._C._autograd._profiler_enabled


class ProfilerRanges(StepObserver):
    """Each action is a range of its name in the profile."""

    def before_step(self, step: StepView, batch: Batch) -> bool:
        self.actions: Sequence[AnyAction] = step.actions
        return True

    def before_action(self, at: int) -> None:
        self.range = torch.profiler.record_function(f"penstock:{self.actions[at]}")
        self.range.__enter__()

    def after_action(self, at: int, *, failed: bool) -> None:
        self.range.__exit__(None, None, None)


class WaitForDevice(StepObserver):
    """An action is over when the device has done it, so that an error of the device is known to be its own."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def before_step(self, step: StepView, batch: Batch) -> bool:
        self.actions: Sequence[AnyAction] = step.actions
        return True

    def after_action(self, at: int, *, failed: bool) -> None:
        if not failed:
            self.transport.wait_for_device(str(self.actions[at]))
