"""What a report shows of one step: its measured timeline, why ranks were idle, and the memory that was taken."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.front import Pipeline
from penstock.simulate import Timeline
from penstock.train.train_job import Batch


def measure_step(pipe: Pipeline, batch: Batch, *, rounds: int = 3) -> Timeline:
    """The timeline of the quickest of some training steps, with idle time by cause.

    Gradients are dropped, random numbers are put back.
    """
    args, target = batch
    steps = pipe.schedule.steps
    pipe.step(*args, target=target)
    found = []
    for _ in range(rounds):
        with pipe.record() as recording:
            pipe.step(*args, target=target)
        found.append(recording.timeline)
    pipe.zero_grad()
    pipe.schedule.steps = steps
    return min(found, key=lambda timeline: timeline.makespan)


def measure_memory(pipe: Pipeline, batch: Batch) -> list[int]:
    """The most bytes that a step holds on each rank beside parameters and gradients."""
    args, target = batch
    steps = pipe.schedule.steps
    pipe.step(*args, target=target)
    pipe.zero_grad(set_to_none=False)  # gradients have their memory before the step
    if pipe.transport.device.type == "cpu":
        with Held() as held:
            pipe.step(*args, target=target)
        peak = held.most
    else:
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        pipe.step(*args, target=target)
        peak = torch.accelerator.max_memory_allocated() - before
    pipe.zero_grad()
    pipe.schedule.steps = steps
    return [int(post) for post in pipe.transport.gather("the memory of a step", str(peak).encode())]


class Held(TorchDispatchMode):
    """Counts the bytes of all tensors that are made inside, as long as they live.

    >>> with Held() as held:
    ...     a = torch.ones(100)
    ...     b = a + 1
    ...     del b
    ...     c = a * 2
    >>> held.now, held.most
    (800, 800)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self._count(tensor.untyped_storage(), args)
        return result

    def _count(self, storage: torch.UntypedStorage, args: Any) -> None:
        key = storage._cdata
        given = (value.untyped_storage()._cdata for value in args if isinstance(value, torch.Tensor))
        if key in self._seen or key in given:  # known, or a view or an update of what was there before
            return
        size = storage.nbytes()
        self._seen.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._release, key, size).atexit = False

    def _release(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size
