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

from penstock.front.choose import Choice
from penstock.front.ends import Ends
from penstock.run.schedule import Schedule
from penstock.simulate import measured_costs

_WARM_UP = 2


def calibrated(
    choice: Choice, schedule: Schedule, ends: Ends, step: Callable[[], object], *, rounds: int = 5
) -> Choice:
    """The choice with the costs of its stages, and of what is around a step, as some steps have them."""
    timelines, seconds = [], []
    with leaving_no_trace(schedule):
        for _ in range(_WARM_UP):
            step()
        for _ in range(rounds):
            with schedule.record() as recording:
                step()
            timelines.append(recording.timeline)
            began = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - began)
    slowest = max(ends.gather("the seconds of a step", statistics.median(seconds)))
    costs = measured_costs(timelines, choice.costs)
    around = max(slowest - statistics.median(timeline.makespan for timeline in timelines), 0.0)
    return replace(choice, calibrated=costs, machine=replace(choice.machine, around=around))


@contextmanager
def leaving_no_trace(schedule: Schedule) -> Iterator[None]:
    """Gradients, buffers, random numbers and the count of steps are afterwards what they were."""
    modules = [stage.submod for stage in schedule.stages]
    gradients = [(parameter, parameter.grad) for module in modules for parameter in module.parameters()]
    buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    device = schedule.stages[0].device
    devices = [] if device.type == "cpu" else [device]
    steps = schedule.steps
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
            yield
    finally:
        schedule.steps = steps
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
