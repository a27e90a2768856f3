"""A list scheduler: whenever a rank is free, it does the most urgent of what is ready and fits its memory.

Each rank does its forwards in one fixed order, so that memory cannot fill up with microbatches that are half-way, while
an input gradient may overtake another. Weight gradients, which nobody waits for, fill the gaps; the oldest is done at once
when the memory is full and that lets a more urgent forward begin. A rank may also wait a little for something more urgent
that is under way instead of doing what is ready. Where a backward in one piece is the cheaper one, some are not split.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from penstock.search.job import SearchJob


@dataclass(frozen=True)
class Urgency:
    """What comes first: the ready task of a rank with the least key."""

    keys: list[float]  # by task; within a link they grow with the microbatch
    patience: float  # a weight gradient fills a gap of at least `patience` times its own time
    hold: float  # how long a rank waits for a more urgent task that is under way, as a share of a microbatch's time
    whole: tuple[int, ...] = ()  # by rank: the backwards of microbatches before this one are not split; (): all are

    def forwards(self, job: SearchJob) -> list[list[int]]:
        """By rank: its forwards, in order."""
        size, keys = job.num_microbatches, self.keys
        return [
            sorted(
                (task for stage in job.placement.stages_of(rank) for task in range(stage * size, stage * size + size)),
                key=keys.__getitem__,
            )
            for rank in range(job.placement.num_ranks)
        ]

    def unsplit(self, job: SearchJob) -> list[int]:
        """The input gradients that are done together with their weight gradients."""
        size = job.num_microbatches
        return [
            link * size + number
            for rank, before in enumerate(self.whole)
            for link in job.backward_links[rank]
            for number in range(min(before, size))
        ]


@dataclass(frozen=True)
class Listing:
    """One run of the scheduler: when the last action is over, and what each rank does, in order."""

    end: float
    done: list[list[int]]  # by rank: tasks; -1 - task stands for the weight gradient of that task's stage
    unsplit: frozenset[int]

    def codes(self, job: SearchJob) -> tuple[tuple[int, ...], ...]:
        """The packed actions of each rank."""

        def code(task: int) -> int:
            if task < 0:
                return job.weight_code(-1 - task)
            return job.whole_code(task) if task in self.unsplit else job.codes[task]

        return tuple(tuple(map(code, done)) for done in self.done)


def list_schedule(job: SearchJob, urgency: Urgency) -> Listing | None:
    """Run the scheduler; None if the ranks block one another for want of memory.

    One long function, because the search is as good as it is fast: every name in the loop is a local one.
    """
    size, num_tasks, half = job.num_microbatches, job.num_tasks, job.num_tasks // 2
    times, held, kept = list(job.time), list(job.reserved), list(job.kept)
    weight_times, crossing, unsplit = job.weight_time, job.crossing, frozenset(urgency.unsplit(job))
    for task in unsplit:
        times[task], kept[task] = job.whole_time[task], 0.0
        held[task] = held[(job.num_links - 1 - task // size) * size + task % size] = job.held[task]
    rank_of_link, backward_links = job.rank_of_link, job.backward_links
    keys, patience, hold = urgency.keys, urgency.patience, urgency.hold * job.pace
    ranks = range(job.placement.num_ranks)
    forwards = urgency.forwards(job)
    for order in forwards:
        order.append(-1)  # no forward is left
    begun = [0 for _ in ranks]  # how many forwards
    next_back = [link * size for link in range(job.num_links)]  # by backward link: its next task
    ready = [0.0] * size + [inf] * num_tasks  # by task: when what it needs has arrived
    room = [limit * (1 + 1e-9) for limit in job.limits]
    owed: list[deque[int]] = [deque() for _ in ranks]  # input gradients whose weight gradients are to be done
    done: list[list[int]] = [[] for _ in ranks]
    clock = [0.0 for _ in ranks]  # when each rank is free
    due = [0.0 for _ in ranks]  # when it looks for something to begin; later than its clock: it waits
    queue = [(0.0, rank) for rank in ranks]
    while queue:
        now, rank = heappop(queue)
        if now != due[rank]:
            continue  # it was called earlier
        # 1. The most urgent that is ready (best), what is under way (soon), the most urgent worth waiting for (coming).
        best, best_key, soon, coming, coming_key = -1, inf, inf, inf, inf
        until = now + hold
        for link in backward_links[rank]:
            task = next_back[link]
            if (time := ready[task]) <= now:
                if (key := keys[task]) < best_key:
                    best, best_key = task, key
            elif time < inf:
                if time < soon:
                    soon = time
                if time <= until and (key := keys[task]) < coming_key:
                    coming, coming_key = time, key
        waiting = owed[rank]
        task = forwards[rank][begun[rank]]
        if task >= 0 and (time := ready[task]) < inf and ((key := keys[task]) < best_key or best < 0):
            missing = held[task] - room[rank]
            if time <= now:
                if missing <= 0.0:
                    best, best_key = task, key
                elif waiting and (best < 0 or missing <= kept[waiting[0]]):
                    best, soon, coming_key = -1, inf, inf  # a weight gradient makes room for it
            elif missing <= 0.0 or waiting:
                if time < soon:
                    soon = time
                if missing <= 0.0 and time <= until and key < coming_key:
                    coming, coming_key = time, key
        if best >= 0 and coming_key < best_key:
            best, soon = -1, coming
        # 2. Begin it, or a weight gradient, or wait.
        if best < 0:
            if waiting and soon - now >= patience * weight_times[waiting[0]]:
                task = waiting.popleft()
                room[rank] += kept[task]
                done[rank].append(-1 - task)
                clock[rank] = soon = now + weight_times[task]
            due[rank] = soon
            if soon < inf:
                heappush(queue, (soon, rank))
            continue
        done[rank].append(best)
        end = clock[rank] = due[rank] = now + times[best]
        heappush(queue, (end, rank))
        if best < half:
            room[rank] -= held[best]
            begun[rank] += 1
        else:
            room[rank] += held[best] - kept[best]
            if best not in unsplit:
                waiting.append(best)
            next_back[best // size] = best + 1 if (best + 1) % size else num_tasks
        # 3. Tell the rank that goes on with it.
        after = best + size
        if after < num_tasks:
            arrival = ready[after] = end + crossing[best]
            other = rank_of_link[after // size]
            if clock[other] < due[other] and arrival < due[other]:
                due[other] = arrival if arrival > clock[other] else clock[other]
                heappush(queue, (due[other], other))
    return Listing(max(clock), done, unsplit) if sum(map(len, done)) == half * 3 - len(unsplit) else None
