"""Choose another plan or another cut by measured steps.

choice = calibrated(choice, schedule, ends, lambda: schedule.step(batch, target=labels), rounds=12)    # every rank calls it
with Replanner(0.05, choice.costs).around(schedule):
    schedule.step(batch, target=labels)                    # the plan may be another one afterwards
profile = recut(choice, timelines, ends, gain=0.05)        # None: no other cut is worth it
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from penstock.balance import Profile
from penstock.errors import PlanError, RunError
from penstock.front.candidates import fastest_cut
from penstock.front.choice import Choice, stage_costs
from penstock.front.mesh import PipelineMesh
from penstock.plan import Op, Plan
from penstock.run.compiled_costs import compiled_costs
from penstock.run.schedule import Schedule
from penstock.search import search
from penstock.simulate import Costs, Timeline, measured_costs, simulate
from penstock.stage.buffers import Buffers, RandomState, accelerators

_WARM_UP = 2
_LIMIT = 100_000  # rounds; a number beyond that is a slip
_MOST = 3  # so many times the rounds are measured at most
_SPREAD = 0.1  # of the median step: the middle half of the steps must lie within that
_TAKEN = 0.05  # of a step: what a rank may be without a processor
_FIRST, _EVERY, _MEASURED = 4, 100, 3  # the first steps are cold; then how often, and how many steps are measured
_TRIES = 10


def calibrated(
    choice: Choice, schedule: Schedule, ends: PipelineMesh, step: Callable[[], object], *, rounds: int
) -> Choice:
    """The choice with the costs of its stages, and of what is around a step, as some steps have them.

    Steps are measured as they come in a training: all ranks begin together, and find no gradients. More of them are measured
    where they differ much, or where something else had the processors. All ranks of all replicas make as many steps, since these
    wait for one another.
    """
    steps: list[tuple[Timeline, float]] = []  # each with what it took beside its actions
    with leaving_no_trace(schedule) as drop_gradients:
        for at in range(_WARM_UP + _MOST * rounds):
            if len(steps) >= rounds and not ends.ranks.any(not enough([timeline for timeline, _ in steps], rounds)):
                break
            drop_gradients()
            ends.own.barrier("about to measure a step")
            with schedule.record() as recording:
                began = time.perf_counter()
                step()
                seconds = time.perf_counter() - began
            if at >= _WARM_UP:
                steps.append((recording.timeline, seconds - recording.timeline.makespan))
    free = [one for one in steps if is_free(one[0])]
    used = free if 2 * len(free) > len(steps) else steps  # where most are disturbed, those of the training will be
    beside = max(
        ends.own.all_gather("what a step takes beside its actions", statistics.median(around for _, around in used))
    )
    costs = compiled_costs(schedule, measured_costs([timeline for timeline, _ in used], choice.costs))
    return replace(choice, calibrated=costs, machine=replace(choice.machine, around=max(beside, 0.0)))


def check_rounds(rounds: object) -> None:
    """Before any rank begins to measure."""
    if not isinstance(rounds, int) or not 1 <= rounds <= _LIMIT:
        raise RunError(f"calibrate(rounds={rounds!r}); expected the number of steps to measure, from 1 to {_LIMIT:,}")


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
    """Restore gradients, buffers, random state and the count of steps afterwards.

    Inside there are no gradients; what is yielded drops those that have come up.
    """
    modules = [stage.submod for stage in schedule.stages]
    parameters = list({id(p): p for module in modules for p in module.parameters()}.values())
    tensors = (*parameters, *(buffer for module in modules for buffer in module.buffers()))
    random = RandomState(accelerators(schedule.stages[0].device, tensors))
    steps, buffers, gradients = schedule.steps, Buffers(modules).look(()), [p.grad for p in parameters]

    def drop_gradients() -> None:
        for parameter in parameters:
            parameter.grad = None

    try:
        drop_gradients()
        yield drop_gradients
    finally:
        schedule.steps = steps
        buffers.put_back()
        random.set()
        for parameter, gradient in zip(parameters, gradients, strict=True):
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


def recut(choice: Choice, timelines: Sequence[Timeline], ends: PipelineMesh, *, gain: float) -> Profile | None:
    """The profile with how slow each rank is, if a cut that minds it makes a step shorter by at least this share.

    A rank is as slow as its stages are in these steps, beside what the profile says of their layers. Whoever is given the profile
    cuts by it: `Pipeline(profile=...)`. It is the same on every rank, by the timelines of the first one.
    """

    def decide() -> str:
        times = rank_times(choice, timelines)
        now = replace(choice, machine=replace(choice.machine, ranks=times), calibrated=None)
        then = fastest_cut(now)
        if then.boundaries == choice.boundaries or then.timeline.makespan > (1 - gain) * now.timeline.makespan:
            return ""
        return replace(choice.profile, metadata={**choice.profile.metadata, "rank_times": list(times)}).dumps()

    text = ends.ranks.broadcast("how to cut the model from now on", decide)
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
