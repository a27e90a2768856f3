"""floor(job): a time that no schedule for the job can beat. It is what the gap is measured from.

Every bound looks at one rank, which has a certain amount of work to do, and at times at which it can do little of it.

*At the beginning* no input gradient can be on the rank before one microbatch has gone all the way to the end and back to
here. Until then the rank can do forwards only, those of each stage not before the first microbatch reaches it, and no more
than its memory holds, for nothing is released yet. The rest of that time it is idle.

*At the end*, once its last forward is over, that microbatch still has all its way to go to the end and back to the first
stage. Meanwhile the rank can only do the gradients of what it holds. And once its last input gradient is over, that one
still has to go on to the first stage, while the rank can only do the weight gradients of what it holds.

The beginning comes before the first input gradient, the end after the last forward or input gradient. So both idle times
count, unless the memory is so large that all forwards may come before the first input gradient; then beginning and end as seen
from the last forward may be one and the same time, and only the larger counts.

With unit costs, two stages a rank as a V and room for k activations, the rank at the turn is idle for 3 p - k slots at the
beginning and for 3 p - 2 k - 1 at the end: the bound 6 m + 6 p - 3 k - 1 of arXiv 2405.15362.

*Alone*, every microbatch has its whole way to go, so none ends before the largest could with all ranks to itself.

*All the time* a rank holds no more than its memory, and each microbatch stays for as long as its way to the end and back takes.
Memory times time is therefore at least the sum over all microbatches.

Where all that is held has a common measure, the memory counts down to the last whole one: 2.5 activations are two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from math import inf

from penstock.checks import check_types
from penstock.errors import PlanError
from penstock.search.integer_scale import within
from penstock.search.search_problem import SearchJob

_Item = tuple[float, float]  # the time that it takes, the memory that it needs


def floor(job: SearchJob) -> float:
    """No schedule ends before, with these costs, this placement, and this memory on each rank.

    >>> from penstock.plan import Placement
    >>> from penstock.simulate import Costs
    >>> costs = Costs.per_rank(num_stages=32, stages_per_rank=4)
    >>> [round(4 * floor(SearchJob.of(Placement.loop(8, 4), 24, costs, memory))) - 288 for memory in (8, 5)]
    [7, 19]
    """
    check_types("floor", PlanError, job=(job, SearchJob))
    ways = _Ways(job)
    return max([ways.alone, *(_of_rank(job, ways, rank) for rank in range(job.placement.num_ranks))])


class _Ways:
    """Times of microbatches along the chain of stages."""

    def __init__(self, job: SearchJob) -> None:
        size, half, stages = job.num_microbatches, job.placement.num_stages, job.stage_of_link
        self.forward, self.back, self.weight = least_times(job)  # by stage and microbatch
        self.alone = 0.0  # all of it, for the slowest
        self.stay = [0.0] * (half * size)  # by stage and microbatch: from the begin of F to the end of I
        before, after = [], []  # by microbatch and link: until it may begin; from its end to the last weight gradient
        for number in range(size):
            times = [(self.forward if k < half else self.back)[s * size + number] for k, s in enumerate(stages)]
            steps = [time + job.crossing[link * size + number] for link, time in enumerate(times)]
            begins = [0.0, *accumulate(steps)]
            total = begins.pop() + self.weight[number]
            before.append(begins)
            after.append([total - begin - time for begin, time in zip(begins, times, strict=True)])
            self.alone = max(self.alone, total)
            for stage in range(half):
                self.stay[stage * size + number] = begins[~stage] + times[~stage] - begins[stage]
        self.before: tuple[float, ...] = tuple(map(min, zip(*before, strict=True)))  # of the fastest
        self.after: tuple[float, ...] = tuple(map(min, zip(*after, strict=True)))


def least_times(job: SearchJob) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """By stage and microbatch, what F, I and W take at least: a backward in one piece, or a fused pair, may take less."""
    costs, size, half = job.costs, job.num_microbatches, job.placement.num_stages
    forward, back, weight = [], [], []
    for stage in range(half):
        for number in range(size):
            task, mirror = stage * size + number, (2 * half - 1 - stage) * size + number
            f, i = job.time[task], job.time[mirror]
            both = min(i + job.weight_time[mirror], job.whole_time[mirror])
            if costs.overlap is not None:
                fused = (costs.overlap + costs.overhead) / 2
                f, both = min(f, fused), min(both, fused)
            forward.append(f)
            back.append(min(i, both))
            weight.append(both - back[-1])
    return tuple(forward), tuple(back), tuple(weight)


def _of_rank(job: SearchJob, ways: _Ways, rank: int) -> float:
    size, half = job.num_microbatches, job.placement.num_stages
    stages = job.placement.stages_of(rank)
    cells = [stage * size + number for stage in stages for number in range(size)]
    held, kept = job.held, tuple(map(min, job.held, job.kept))  # a backward in one piece keeps no more than was held
    limit = within(job.limits[rank], (one for cell in cells for one in (held[cell], kept[cell]))) * (1 + 1e-9)

    def forwards_of(stage: int) -> list[_Item]:
        return [(ways.forward[cell], held[cell]) for cell in range(stage * size, stage * size + size)]

    forwards = [item for stage in stages for item in forwards_of(stage)]
    gradients = [(ways.back[cell] + ways.weight[cell], held[cell]) for cell in cells]
    weights = [(ways.weight[cell], kept[cell]) for cell in cells]
    work = sum(time for time, _ in forwards) + sum(time for time, _ in gradients)

    returns = min(ways.before[2 * half - 1 - stage] for stage in stages)
    begins = min(ways.before[stage] for stage in stages)
    early = [item for s in stages for item in _within(returns - ways.before[s], forwards_of(s))]
    filling = max(begins, returns - _most(early, limit))
    since_back = min(ways.after[2 * half - 1 - stage] for stage in stages) - _most(weights, limit)
    left = min(_most([*gradients, *weights], limit), sum(time for time, _ in gradients))
    since_forward = min(ways.after[stage] for stage in stages) - left
    area = sum(ways.stay[cell] * held[cell] + ways.weight[cell] * kept[cell] for cell in cells)
    crowded = begins + area / limit if limit else 0.0
    if sum(memory for _, memory in forwards) > limit:
        return max(crowded, work + filling + max(0.0, since_back, since_forward))
    return max(crowded, work + max(filling + max(0.0, since_back), since_forward))


def _within(time: float, items: list[_Item]) -> Iterator[_Item]:
    """The items that are worth most for their memory and take no longer than `time` together; the last in part."""
    for worth, memory in sorted(items, key=_density, reverse=True):
        if worth >= time:
            if worth and time > 0.0:
                yield time, memory * time / worth
            return
        yield worth, memory
        time -= worth


def _density(item: _Item) -> float:
    return item[0] / item[1] if item[1] else inf


def _most(items: Iterable[_Item], limit: float) -> float:
    """The longest time that items within the limit of memory can take; the last may be taken in part."""
    time, room = 0.0, limit
    for worth, memory in sorted(items, key=_density, reverse=True):
        if memory <= room:
            time, room = time + worth, room - memory
        else:
            return time + worth * room / memory
    return time
