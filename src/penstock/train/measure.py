"""What a report shows of one step: its measured timeline, why ranks were idle, and the memory that was taken."""

from __future__ import annotations

from penstock.front import Pipeline
from penstock.front.memory_view import Memory
from penstock.simulate import Timeline
from penstock.train.train_job import Batch

_ROUNDS = 3  # of steps that are measured


def measure_step(pipe: Pipeline, batch: Batch) -> Timeline:
    """The timeline of the median of some training steps, with idle time by cause.

    Gradients are dropped, random numbers are put back.
    """
    args, target = batch
    steps = pipe.schedule.steps
    pipe.step(*args, target=target)
    found = []
    for _ in range(_ROUNDS):
        with pipe.record() as recording:
            pipe.step(*args, target=target)
        found.append(recording.timeline)
    pipe.zero_grad()
    pipe.schedule.steps = steps
    return sorted(found, key=lambda timeline: timeline.makespan)[_ROUNDS // 2]


def measure_memory(pipe: Pipeline, batch: Batch) -> Memory:
    """What a step holds on each rank beside parameters and gradients, planned and counted.

    Gradients are dropped.
    """
    args, target = batch
    steps = pipe.schedule.steps
    pipe.step(*args, target=target)
    with pipe.watch_memory():
        pipe.step(*args, target=target)
    pipe.zero_grad()
    pipe.schedule.steps = steps
    return pipe.memory()
