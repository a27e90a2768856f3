"""What a report shows of one step: its measured timeline, why ranks were idle, and the memory that was taken."""

from __future__ import annotations

from penstock.front import Pipeline
from penstock.front.memory_view import Memory
from penstock.simulate import Timeline
from penstock.train.train_job import Batch

_ROUNDS = 3  # of steps that are measured


def measure(pipe: Pipeline, batch: Batch) -> tuple[Timeline, Memory]:
    """The timeline of the median of some training steps, and what a step holds beside parameters and gradients.

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
    with pipe.watch_memory():
        pipe.step(*args, target=target)
    pipe.zero_grad()
    pipe.schedule.steps = steps
    return sorted(found, key=lambda timeline: timeline.makespan)[_ROUNDS // 2], pipe.memory()
