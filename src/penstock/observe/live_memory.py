"""Measured memory: what a rank holds after each action of a step, and the most within each.

    with schedule.watch_memory() as memory:
        schedule.step(batch, target=labels)
    print(memory.peak, memory.levels)

Counted is what a step makes for itself: not parameters, gradients and the batch. On the host every operation that makes a
tensor is seen, which takes time; an accelerator's own allocator counts for nothing. Devices whose allocator keeps no count
are treated like the host.
"""

from __future__ import annotations

import torch

from penstock.batch.batch import Batch
from penstock.comm.transport import Transport
from penstock.observe.observer import StepObserver, StepView
from penstock.plan import Plan
from penstock.stage.held import Held


class DeviceMeter:
    """Memory of an accelerator, as its allocator counts it; what was there at first is taken off. See `Held`."""

    def __init__(self) -> None:
        self.before = torch.accelerator.memory_allocated()

    def __enter__(self) -> None:
        torch.accelerator.reset_peak_memory_stats()

    def __exit__(self, *_: object) -> None:
        return None

    @property
    def now(self) -> int:
        return torch.accelerator.memory_allocated() - self.before

    @property
    def most(self) -> int:
        return torch.accelerator.max_memory_allocated() - self.before


def allocator_counts() -> bool:
    """Whether the accelerator's allocator says how much it has given out."""
    try:
        return bool(torch.accelerator.memory_stats())
    except (RuntimeError, NotImplementedError):  # a device from outside of torch need not have such a thing
        return False


class MemoryWatch(StepObserver):
    """Counts the bytes that this rank holds in the steps inside; those of the last step stay."""

    def __init__(self, transport: Transport) -> None:
        self.allocator_counts = transport.device.type != "cpu" and allocator_counts()
        self.plan: Plan | None = None
        self.levels: list[int] = []  # after each action
        self.peaks: list[int] = []  # the most within each
        self.buffers: list[int] = []  # of the levels, what is in buffers of messages

    @property
    def peak(self) -> int:
        """The most bytes at a time."""
        return max(self.peaks, default=0)

    def before_step(self, step: StepView, batch: Batch) -> bool:
        self.plan, self._step = step.plan, step
        self.levels, self.peaks, self.buffers = [], [], []
        self.meter = DeviceMeter() if self.allocator_counts else Held()
        self.without = [p for p in step.parameters if p.grad is None]
        return True

    def before_action(self, at: int) -> None:
        self.meter.__enter__()

    def after_action(self, at: int, *, failed: bool) -> None:
        gradients = sum(p.grad.nbytes for p in self.without if p.grad is not None)
        self.peaks.append(self.meter.most - gradients)  # an action that runs out of memory counts too
        self.meter.__exit__(None, None, None)
        if not failed:
            self.levels.append(self.meter.now - gradients)
            self.buffers.append(self._step.buffered_bytes())
