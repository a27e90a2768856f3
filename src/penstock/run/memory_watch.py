"""Measured memory: what a rank holds after each action of a step, and the most within each.

    with schedule.watch_memory() as memory:
        schedule.step(batch, target=labels)
    print(memory.peak, memory.levels)

Counted is what a step makes for itself: not parameters, gradients and the batch. On the host every operation that makes a
tensor is seen, which takes time; an accelerator's own allocator counts for nothing. Devices whose allocator keeps no count
are treated like the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from penstock.comm.transport import Transport
from penstock.plan import Plan
from penstock.run.program import Program
from penstock.run.setting import Call
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


class MemoryWatch:
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

    def watched(self, program: Program, calls: Sequence[Call]) -> list[Call]:
        """The calls of a step, each of which is counted."""
        self.plan = program.plan
        self.levels, self.peaks, self.buffers = [], [], []
        self.meter = DeviceMeter() if self.allocator_counts else Held()
        self.without = [p for p in program.parameters if p.grad is None]
        return [partial(self.counted, program, call) for call in calls]

    def counted(self, program: Program, call: Call) -> None:
        meter = self.meter
        with meter:
            try:
                call()
            finally:  # an action that runs out of memory counts too
                gradients = sum(p.grad.nbytes for p in self.without if p.grad is not None)
                self.peaks.append(meter.most - gradients)
        self.levels.append(meter.now - gradients)
        self.buffers.append(in_buffers(program))


def in_buffers(program: Program) -> int:
    """Bytes that lie between actions: receives that are posted or have arrived, gradients of boundary values.

    An input whose gradient is there waits for that to be sent, and counts with it.
    """
    found: list[Tensor | None] = []
    for inbox in program.inboxes.values():
        for leaves, works in zip(inbox.arrived, inbox.works, strict=True):
            done = [leaf for leaf in leaves or () if leaf.is_leaf and leaf.grad is not None]
            found += (leaves or ()) if works is not None else [leaf.grad for leaf in done]
            found += done if inbox.channel is not None else ()
    for outbox in program.outboxes.values():
        found += [tensor for buffers in outbox.arrived for tensor in buffers or ()]
    return sum(tensor.nbytes for tensor in found if tensor is not None)
