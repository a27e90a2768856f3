"""What a report shows of one step: its measured timeline, why ranks were idle, and the memory that was taken."""

from __future__ import annotations

import torch

from penstock.front import Pipeline
from penstock.simulate import Timeline
from penstock.stage.held import Held
from penstock.train.train_job import Batch


def measure_step(pipe: Pipeline, batch: Batch, *, rounds: int = 3) -> Timeline:
    """The timeline of the median of some training steps, with idle time by cause.

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
    return sorted(found, key=lambda timeline: timeline.makespan)[rounds // 2]


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
