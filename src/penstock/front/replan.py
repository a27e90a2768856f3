"""Another plan, or another cut: for a rank that ran out of memory, and by what measured steps say.

attempted(attempt, undo, pipe, again=False)    # a step; if it fails, gradients, buffers and random state are as before it
attempted(attempt, undo, pipe, again=True)     # the same, and the batch is done again under a plan that holds less
choice = calibrated(choice, schedule, ends, lambda: schedule.step(batch, target=labels), rounds=12)    # every rank calls it
with Replanner(0.05, choice.costs).around(schedule):
    schedule.step(batch, target=labels)                    # the plan may be another one afterwards
profile = recut(choice, timelines, ends, gain=0.05)        # None: no other cut is worth it
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from penstock.balance import Profile
from penstock.errors import HoldsLess, OutOfMemory, PeerFailed, PlanError, ReplicaFailed, RunError
from penstock.front.candidates import fastest_cut
from penstock.front.choice import Choice, stage_costs
from penstock.front.ends import Ends
from penstock.lower import recompute
from penstock.nest import Value
from penstock.plan import Op, Plan
from penstock.plan.actions import OP, stage_of
from penstock.run.compiled_costs import compiled_costs
from penstock.run.schedule import Schedule
from penstock.search import search
from penstock.simulate import Costs, Timeline, measured_costs, simulate
from penstock.stage.buffers import Before, Buffers, RandomState, accelerators, modes_of

if TYPE_CHECKING:
    from penstock.front.pipeline import Pipeline

_UNDONE = (OutOfMemory, PeerFailed, ReplicaFailed)  # after these the devices still answer
_OTHERWISE = -1  # in place of the rank that ran out of memory: a step failed for another reason
_WARM_UP = 2
_LIMIT = 100_000  # rounds; a number beyond that is a slip
_MOST = 3  # so many times the rounds are measured at most
_SPREAD = 0.1  # of the median step: the middle half of the steps must lie within that
_TAKEN = 0.05  # of a step: what a rank may be without a processor
_FIRST, _EVERY, _MEASURED = 4, 100, 3  # the first steps are cold; then how often, and how many steps are measured
_TRIES = 10


def attempted(attempt: Callable[[], Value], undo: Undo, pipe: Pipeline, *, again: bool) -> Value:
    """A step. What it has changed is put back if a rank, of this or of another replica, could not do it.

    With `again` it is done once more, under a plan that holds less, as long as a rank runs out of memory in it. Replicas then
    ask one another after every step, whatever became of it: those of a rank that ran out of memory have failed too, but do not
    know why, and all must take the same plan.
    """
    asks = again and pipe.num_replicas > 1
    while True:
        undo.take()
        value: Value = None
        error: Exception | None = None
        try:
            value = attempt()
        except Exception as raised:
            if isinstance(raised, _UNDONE):
                undo.put_back()
            if not asks and not (again and isinstance(raised, OutOfMemory)):
                raise
            error = raised
        mine = None if error is None else error.rank if isinstance(error, OutOfMemory) else _OTHERWISE
        found = pipe.gather("whether all replicas had the memory for a step", mine) if asks else [mine]
        if all(one is None for one in found):
            undo.forget()
            return value
        undo.put_back()  # if it has not been: another replica could not do its part
        short = [rank for rank in found if rank not in (None, _OTHERWISE)]
        plan = less(pipe.plan, min(short)) if short else None
        if plan is None:
            raise error or ReplicaFailed(
                "another data-parallel replica failed at the end of this step; its error tells why"
            )
        told = str(error) if mine in short else f"rank {min(short)} of another replica ran out of memory"
        error = None
        gc.collect()  # an error and the frames that it went through may hold one another, and all that was saved in them
        pipe.run_plan(plan)
        if pipe.is_first:
            stages = sorted({stage_of(code) for codes in plan.codes for code in codes if code & OP == Op.R})
            text = f"{told}\nFrom now on stages {stages} are recomputed, and this batch is done again"
            warnings.warn(text, HoldsLess, stacklevel=4)


class Undo:
    """Puts gradients, buffers and random state of this rank back to what they were before a step.

    Gradients that were there are copied, to the memory of the host; those that were not cost nothing. Of the buffers those are
    copied that a step was seen to change; all of them in the first step, and when a part of a module has changed its mode.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self.modules = modules
        self.parameters = list({id(p): p for module in modules for p in module.parameters()}.values())
        self.buffers = Buffers(modules, _aside)
        self.devices = accelerators(device, (*self.parameters, *(b for module in modules for b in module.buffers())))
        self.taken: tuple[list[Tensor | None], Before, RandomState] | None = None  # gradients, buffers, random state

    def take(self) -> None:
        """Before a step."""
        grads = [None if p.grad is None else _aside(p.grad) for p in self.parameters]
        before = self.buffers.look(tuple(mode for module in self.modules for mode in modes_of(module)))
        self.taken = grads, before, RandomState(self.devices)

    @torch.no_grad()
    def put_back(self) -> None:
        """After a step that failed; a second time it does nothing."""
        if self.taken is None:
            return
        (grads, before, random), self.taken = self.taken, None
        for parameter, grad in zip(self.parameters, grads, strict=True):
            if grad is None:
                parameter.grad = None
            elif parameter.grad is None or grad.layout is not torch.strided:
                parameter.grad = grad.to(parameter.device)
            else:
                parameter.grad.copy_(grad)
        before.put_back()
        random.set()

    def forget(self) -> None:
        """After a step, so that copies are held no longer than that."""
        if self.taken is not None:
            self.buffers.learn(self.taken[1])
        self.taken = None


def _aside(tensor: Tensor) -> Tensor:
    """A copy: in the memory of the host, without a wait; of what is spread over ranks beside it."""
    value = tensor.detach()
    if value.device.type == "cpu" or hasattr(value, "_local_tensor") or value.layout is not torch.strided:
        return value.clone()
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)


def less(plan: Plan, rank: int) -> Plan | None:
    """The plan in which the stages of a rank are recomputed; or, if they are, all stages; or None.

    >>> from penstock.schedules import get_schedule
    >>> plan = less(get_schedule("gpipe")(2, 2), 0)
    >>> print(*plan.lines(), sep="\\n")
    rank 0: 0F0 0F1 0R0 0B0 0R1 0B1
    rank 1: 1F0 1F1 1B0 1B1
    >>> print(less(less(plan, 0), 0))
    None
    """
    everything = recompute(plan)  # what holds less already stays as it is
    if everything == plan:
        return None
    here = [codes if other == rank else plan.codes[other] for other, codes in enumerate(everything.codes)]
    found = plan.with_codes(here)
    return everything if found == plan else found


def calibrated(choice: Choice, schedule: Schedule, ends: Ends, step: Callable[[], object], *, rounds: int) -> Choice:
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
    steps, undo = schedule.steps, Undo([stage.submod for stage in schedule.stages], schedule.stages[0].device)
    gradients = [parameter.grad for parameter in undo.parameters]

    def drop_gradients() -> None:
        for parameter in undo.parameters:
            parameter.grad = None

    try:
        drop_gradients()
        undo.take()
        yield drop_gradients
    finally:
        schedule.steps = steps
        undo.put_back()
        for parameter, gradient in zip(undo.parameters, gradients, strict=True):
            parameter.grad = gradient


@dataclass
class Replanner:
    """Watches the steps of a schedule: after some measured ones, `costs` are what they cost and the plan may be another."""

    gain: float  # the share of a step that another plan must save
    known: Costs  # what is known of the stages beside their times
    steps: int = 0
    costs: Costs | None = None
    timelines: list[Timeline] = field(default_factory=list)
    has_changed: bool = False  # whether the step before this one was the last of another plan

    @contextmanager
    def around(self, schedule: Schedule) -> Iterator[None]:
        """Around a step; all ranks count alike, so all measure the same steps."""
        at = self.steps - _FIRST if self.steps < _EVERY else self.steps % _EVERY
        self.steps += 1
        self.has_changed = False
        if not 0 <= at < _MEASURED:
            yield
            return
        with schedule.record() as recording:
            yield
        measured = recording.timeline  # those of another plan, or of a time long past, say nothing of this one
        self.timelines = [one for one in self.timelines if at and one.plan == measured.plan] + [measured]
        if at == _MEASURED - 1:
            self.costs = measured_costs(self.timelines, self.known)
            self.timelines = []
            self.has_changed = schedule.replan(self.costs, gain=self.gain, search=self._searched)

    def _searched(self, plan: Plan) -> list[Plan]:
        """One made to measure, which holds no more than the plan of now; a few tries, since the other ranks wait."""
        assert self.costs is not None, "measured before anything is searched"
        room = list(simulate(plan, self.costs).peak_memory)
        try:
            found = search(
                plan.num_ranks,
                plan.num_microbatches,
                self.costs,
                memory_limit=room,
                placement=plan.placement,
                graph=plan.graph,
                tries=_TRIES,
                reorder=False,  # the weight gradients are to be added up as now
            )
        except PlanError:  # what is recomputed or offloaded may hold less than any that is not
            return []
        return [found.plan]


def recut(choice: Choice, timelines: Sequence[Timeline], ends: Ends, *, gain: float) -> Profile | None:
    """The profile with how slow each rank is, if a cut that minds it makes a step shorter by at least this share.

    A rank is as slow as its stages are in these steps, beside what the profile says of their layers. Whoever is given the profile
    cuts by it: `Pipeline(profile=...)`. It is the same on every rank, by the timelines of the first one.
    """

    def decide() -> str:
        times = rank_times(choice, timelines)
        now = replace(choice, machine=replace(choice.machine, ranks=times), calibrated=None)
        then = fastest_cut(replace(now, budgets=()))
        if then.boundaries == choice.boundaries or then.timeline.makespan > (1 - gain) * now.timeline.makespan:
            return ""
        return replace(choice.profile, metadata={**choice.profile.metadata, "rank_times": list(times)}).dumps()

    text = ends.decide("how to cut the model from now on", decide)
    return Profile.loads(text) if text else None


def rank_times(choice: Choice, timelines: Sequence[Timeline]) -> tuple[float, ...]:
    """How many times as long each rank takes for its layers as the rank in the middle does."""
    plan = choice.plan
    known = stage_costs(choice.profile, choice.bounds, replace(choice.machine, ranks=None), plan.placement)
    measured = measured_costs(timelines, known)

    def busy(costs: Costs, rank: int) -> float:
        return sum(costs.time(Op.F, stage) + costs.time(Op.B, stage) for stage in plan.placement.stages_of(rank))

    ratios = [busy(measured, rank) / (busy(known, rank) or 1.0) for rank in range(plan.num_ranks)]
    usual = statistics.median_low(ratios) or 1.0
    return tuple(round(ratio / usual, 3) for ratio in ratios)
