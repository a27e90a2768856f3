"""A list scheduler: whenever a rank is free, it does the most urgent of what is ready and fits its memory.

Each rank does its forwards in one fixed order, so that memory cannot fill up with microbatches that are half-way, while
an input gradient may overtake another. Weight gradients, which nobody waits for, fill the gaps; the oldest is done at once
when the memory is full and that lets a more urgent forward begin. A rank may also wait a little for something more urgent
that is under way instead of doing what is ready. Where a backward in one piece is the cheaper one, some are not split.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from penstock.plan import Op
from penstock.search.search_problem import SearchJob

_WEIGHT, _WAIT = -1, -2  # what a rank does instead of a task: a weight gradient, or nothing
# By task, as `_work` names them; and the tasks that are not split.
_Figures = tuple[list[float], list[float], list[float], list[float], list[float], frozenset[int]]
_Worker = Generator[tuple[int, float], float, None]


@dataclass(frozen=True)
class Manner:
    """Parameters of the list scheduler: the priority of urgent actions."""

    patience: float = 0.5  # a weight gradient fills a gap of at least `patience` times its own time
    # How long a rank waits for a more urgent task that is under way, as a share of a microbatch's time.
    hold: float = 0.0
    whole: tuple[int, ...] = ()  # by rank: the backwards of microbatches before this one are not split; (): all are

    def unsplit(self, job: SearchJob) -> frozenset[int]:
        """The input gradients that are done together with their weight gradients."""
        size = job.num_microbatches
        return frozenset(
            link * size + number
            for rank, before in enumerate(self.whole)
            for link in job.backward_links[rank]
            for number in range(min(before, size))
        )


_Done = list[list[int]]  # by rank, in order: tasks; -1 - task stands for the weight gradient of that task's stage


def packed(job: SearchJob, done: _Done, manner: Manner) -> tuple[tuple[int, ...], ...]:
    """Return the schedule as the packed actions of each rank."""
    unsplit = manner.unsplit(job)

    def code(task: int) -> int:
        if task < 0:
            return job.code(Op.W, -1 - task)
        return job.code(Op.B, task) if task in unsplit else job.codes[task]

    return tuple(tuple(map(code, row)) for row in done)


def list_schedule(job: SearchJob, keys: list[float], manner: Manner) -> tuple[float, _Done] | None:
    """Run the scheduler: when the last action is over, and what is done; None if the ranks block one another for want of memory.

    `keys` say by task how urgent it is: the least comes first. Within a link they grow with the microbatch.
    """
    size, num_tasks, ranks = job.num_microbatches, job.num_tasks, range(job.placement.num_ranks)
    times, held, kept, unsplit = list(job.time), list(job.reserved), list(job.kept), manner.unsplit(job)
    for task in unsplit:
        times[task], kept[task] = job.whole_time[task], 0.0
        held[task] = held[(job.num_links - 1 - task // size) * size + task % size] = job.held[task]
    ready = [0.0] * size + [inf] * num_tasks  # by task: when what it needs has arrived
    done: _Done = [[] for _ in ranks]
    figures = keys, times, held, kept, ready, unsplit
    workers = [_work(job, manner, figures, rank=rank, done=done[rank]) for rank in ranks]
    for worker in workers:
        next(worker)
    resume = [worker.send for worker in workers]
    rank_of_link, crossing = job.rank_of_link, job.crossing
    clock = [0.0 for _ in ranks]  # when each rank is free
    due = [0.0 for _ in ranks]  # when it looks for something to begin; later than its clock: it waits
    queue = [(0.0, rank) for rank in ranks]
    while queue:
        now, rank = heappop(queue)
        if now != due[rank]:
            continue  # it was called earlier
        task, until = resume[rank](now)
        due[rank] = until
        if until < inf:
            heappush(queue, (until, rank))
        if task != _WAIT:
            clock[rank] = until
        after = task + size
        if task >= 0 and after < num_tasks:  # tell the rank that goes on with it
            arrival = ready[after] = until + crossing[task]
            other = rank_of_link[after // size]
            if clock[other] < due[other] and arrival < due[other]:
                due[other] = arrival if arrival > clock[other] else clock[other]
                heappush(queue, (due[other], other))
    complete = sum(map(len, done)) == num_tasks // 2 * 3 - len(unsplit)
    return (max(clock), done) if complete else None


def _work(job: SearchJob, manner: Manner, figures: _Figures, *, rank: int, done: list[int]) -> _Worker:
    """One rank. It is sent the time, and gives what it begins then (a task, or one of the signs above), and until when.

    A generator, because the search is as good as it is fast: all that it asks for is a local name, and stays one.
    """
    size, num_tasks = job.num_microbatches, job.num_tasks
    keys, times, held, kept, ready, unsplit = figures
    weight_times, patience, hold = job.weight_time, manner.patience, manner.hold * job.pace
    own = (task for stage in job.placement.stages_of(rank) for task in range(stage * size, stage * size + size))
    forwards = iter(sorted(own, key=keys.__getitem__))
    forward = next(forwards)
    backs = [link * size for link in job.backward_links[rank]]  # the next task of each backward link
    owed: deque[int] = deque()  # input gradients whose weight gradients are to be done
    room = job.limits[rank] * (1 + 1e-9)
    begun, end = _WAIT, 0.0
    while True:
        now = yield begun, end
        # 1. The most urgent that is ready (best), what is under way (soon), the most urgent worth waiting for (coming).
        best, best_key, soon, coming, coming_key = -1, inf, inf, inf, inf
        until = now + hold
        for task in backs:
            if (time := ready[task]) <= now:
                if (key := keys[task]) < best_key:
                    best, best_key = task, key
            elif time < inf:
                soon = min(soon, time)
                if time <= until and (key := keys[task]) < coming_key:
                    coming, coming_key = time, key
        if (time := ready[forward]) < inf and ((key := keys[forward]) < best_key or best < 0):
            missing = held[forward] - room
            if time <= now:
                if missing <= 0.0:
                    best, best_key = forward, key
                elif owed and (best < 0 or missing <= kept[owed[0]]):
                    best, soon, coming_key = -1, inf, inf  # a weight gradient makes room for it
            elif missing <= 0.0 or owed:
                soon = min(soon, time)
                if missing <= 0.0 and time <= until and key < coming_key:
                    coming, coming_key = time, key
        if best >= 0 and coming_key < best_key:
            best, soon = -1, coming
        # 2. Begin it, or a weight gradient, or wait.
        if best >= 0:
            begun, end = best, now + times[best]
            done.append(best)
            if best == forward:
                room -= held[best]
                forward = next(forwards, num_tasks)  # which is never ready
            else:
                room += held[best] - kept[best]
                if best not in unsplit:
                    owed.append(best)
                backs[backs.index(best)] = best + 1 if (best + 1) % size else num_tasks
        elif owed and soon - now >= patience * weight_times[owed[0]]:
            task = owed.popleft()
            begun, end = _WEIGHT, now + weight_times[task]
            room += kept[task]
            done.append(-1 - task)
        else:
            begun, end = _WAIT, soon
