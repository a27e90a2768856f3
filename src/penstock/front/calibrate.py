"""What the stages cost while all ranks are at work: found by steps of the pipeline itself, which leave nothing behind.

choice = calibrated(choice, schedule, ends, lambda: schedule.step(batch, target=labels))     # every rank calls it
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from penstock.front.choice import Choice
from penstock.front.ends import Ends
from penstock.run.compiled_costs import compiled_costs
from penstock.run.schedule import Schedule
from penstock.simulate import measured_costs

_WARM_UP = 2


def calibrated(
    choice: Choice, schedule: Schedule, ends: Ends, step: Callable[[], object], *, rounds: int = 12
) -> Choice:
    """The choice with the costs of its stages, and of what is around a step, as some steps have them.

    Steps are measured as they come in a training: all ranks begin together, and find no gradients.
    """
    timelines, around = [], []
    with leaving_no_trace(schedule) as drop_gradients:
        for at in range(_WARM_UP + rounds):
            drop_gradients()
            ends.gather("about to measure a step", None)
            with schedule.record() as recording:
                began = time.perf_counter()
                step()
                seconds = time.perf_counter() - began
            if at >= _WARM_UP:
                timelines.append(recording.timeline)
                around.append(seconds - recording.timeline.makespan)
    beside = max(ends.gather("what a step takes beside its actions", statistics.median(around)))
    costs = compiled_costs(schedule, measured_costs(timelines, choice.costs))
    return replace(choice, calibrated=costs, machine=replace(choice.machine, around=max(beside, 0.0)))


@contextmanager
def leaving_no_trace(schedule: Schedule) -> Iterator[Callable[[], None]]:
    """Gradients, buffers, random numbers and the count of steps are afterwards what they were.

    Inside there are no gradients; what is yielded drops those that have come up.
    """
    modules = [stage.submod for stage in schedule.stages]
    gradients = [(parameter, parameter.grad) for module in modules for parameter in module.parameters()]
    buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    device = schedule.stages[0].device
    devices = [] if device.type == "cpu" else [device]
    steps = schedule.steps

    def drop_gradients() -> None:
        for parameter, _ in gradients:
            parameter.grad = None

    drop_gradients()
    try:
        with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
            yield drop_gradients
    finally:
        schedule.steps = steps
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
