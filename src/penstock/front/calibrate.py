"""What the stages cost while all ranks are at work: found by steps of the pipeline itself, which leave nothing behind.

choice = calibrated(choice, schedule, ends, lambda: schedule.step(batch, target=labels))     # every rank calls it
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from penstock.errors import RunError
from penstock.front.choice import Choice
from penstock.front.ends import Ends
from penstock.run.compiled_costs import compiled_costs
from penstock.run.schedule import Schedule
from penstock.simulate import Timeline, measured_costs
from penstock.stage.buffers import Buffers
from penstock.stage.random_state import RandomState, accelerators

_WARM_UP = 2
_LIMIT = 100_000  # rounds; a number beyond that is a slip
_MOST = 3  # so many times the rounds are measured at most
_SPREAD = 0.1  # of the median step: the middle half of the steps must lie within that
_TAKEN = 0.05  # of a step: what a rank may be without a processor


def calibrated(
    choice: Choice, schedule: Schedule, ends: Ends, step: Callable[[], object], *, rounds: int = 12
) -> Choice:
    """The choice with the costs of its stages, and of what is around a step, as some steps have them.

    Steps are measured as they come in a training: all ranks begin together, and find no gradients. More of them are measured
    where they differ much, or where something else had the processors. All ranks of all replicas make as many steps, since these
    wait for one another.
    """
    if not 1 <= rounds <= _LIMIT:
        raise RunError(f"calibrate(rounds={rounds}); expected the number of steps to measure, from 1 to {_LIMIT:,}")
    steps: list[tuple[Timeline, float]] = []  # each with what it took beside its actions
    with leaving_no_trace(schedule) as drop_gradients:
        for at in range(_WARM_UP + _MOST * rounds):
            if len(steps) >= rounds and not ends.any(not enough([timeline for timeline, _ in steps], rounds)):
                break
            drop_gradients()
            ends.gather("about to measure a step", None)
            with schedule.record() as recording:
                began = time.perf_counter()
                step()
                seconds = time.perf_counter() - began
            if at >= _WARM_UP:
                steps.append((recording.timeline, seconds - recording.timeline.makespan))
    free = [one for one in steps if is_free(one[0])]
    used = free if 2 * len(free) > len(steps) else steps  # where most are disturbed, those of the training will be
    beside = max(ends.gather("what a step takes beside its actions", statistics.median(around for _, around in used)))
    costs = compiled_costs(schedule, measured_costs([timeline for timeline, _ in used], choice.costs))
    return replace(choice, calibrated=costs, machine=replace(choice.machine, around=max(beside, 0.0)))


def enough(timelines: Sequence[Timeline], rounds: int) -> bool:
    """Whether so many steps had the processors to themselves, and the middle half of them took about the same time."""
    taken = sorted(timeline.makespan for timeline in timelines if is_free(timeline))
    if len(taken) < rounds:
        return False
    middle = taken[len(taken) // 4 : len(taken) - len(taken) // 4]
    return middle[-1] - middle[0] <= _SPREAD * statistics.median(taken)


def is_free(timeline: Timeline) -> bool:
    """Whether the ranks had a processor whenever they had something to compute."""
    return timeline.kept_waiting <= _TAKEN * timeline.makespan


@contextmanager
def leaving_no_trace(schedule: Schedule) -> Iterator[Callable[[], None]]:
    """Gradients, buffers, random numbers and the count of steps are afterwards what they were.

    Inside there are no gradients; what is yielded drops those that have come up.
    """
    modules = [stage.submod for stage in schedule.stages]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    gradients = [parameter.grad for parameter in parameters]
    buffers, random = Buffers(modules).look(()), RandomState(accelerators(schedule.stages[0].device, parameters))
    steps = schedule.steps

    def drop_gradients() -> None:
        for parameter in parameters:
            parameter.grad = None

    drop_gradients()
    try:
        yield drop_gradients
    finally:
        schedule.steps = steps
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        buffers.put_back()
        random.set()
