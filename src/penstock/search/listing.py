"""A list scheduler: whenever a rank is free, it does the most urgent of the actions that are ready and fit its memory.

Forwards and input gradients are done by urgency; weight gradients, which nobody waits for, fill the gaps between, and are
done at once when the memory is full.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from math import inf

from penstock.plan import Op, Plan
from penstock.plan.actions import (
    MICROBATCH,
    MICROBATCH_SHIFT,
    OP,
    STAGE,
    STAGE_SHIFT,
    backward_input,
    backward_weight,
    forward,
    parts,
)
from penstock.search.job import Job

_NOTHING = (inf, -1, -1)
_SHAKEN = 0.1  # the share of microbatches that are moved by themselves


Keys = list[list[float]]


@dataclass(frozen=True)
class Urgency:
    """What comes first: the ready action of a rank with the least key.

    `forward` and `backward` have a key for each stage and microbatch; both grow with the microbatch. A weight gradient is
    done when there is nothing more urgent for at least `patience` times its own time.
    """

    forward: Keys
    backward: Keys
    patience: float

    @classmethod
    def by_lags(cls, job: Job, *, forward_lag: float, backward_lag: float, turn: float, patience: float) -> Urgency:
        """By few numbers, all in microbatches; the stages of a rank are counted from 0.

        The forward of microbatch m on the rank's stage k is as urgent as that of m + `forward_lag` on stage k - 1; with a lag
        of 0 a microbatch is rushed through, with a large one the ranks work stage by stage. Likewise `backward_lag`, on the
        way back. `turn` is how much less urgent gradients are than forwards.
        """
        numbers = range(job.num_microbatches)
        ranks = job.placement.ranks
        last = [len(job.placement.stages_of(rank)) - 1 for rank in ranks]
        return cls(
            [[m + place * forward_lag for m in numbers] for place in job.place],
            [[m + turn + (last[s] - place) * backward_lag for m in numbers] for s, place in enumerate(job.place)],
            patience,
        )

    @classmethod
    def by_plan(cls, job: Job, plan: Plan, *, patience: float) -> Urgency:
        """In the order of a plan: the gaps are filled anew, and what would make a rank wait may be overtaken."""
        size, stages = job.num_microbatches, range(job.placement.num_stages)
        urgency = cls([[0.0] * size for _ in stages], [[0.0] * size for _ in stages], patience)
        for codes in plan.codes:
            for position, code in enumerate(part for packed in codes for part in parts(packed)):
                op = code & OP
                if op != Op.W:
                    table = urgency.forward if op == Op.F else urgency.backward
                    table[code >> STAGE_SHIFT & STAGE][code >> MICROBATCH_SHIFT & MICROBATCH] = float(position)
        return urgency

    def shaken(self, rng: random.Random, spread: float) -> Urgency:
        """The same with each stage, and a few microbatches, a little more or less urgent."""

        def shake(row: list[float]) -> list[float]:
            shift = rng.gauss(0.0, spread)
            return sorted(key + shift + (rng.gauss(0.0, spread) if rng.random() < _SHAKEN else 0.0) for key in row)

        patience = rng.random() if rng.random() < 0.5 else self.patience
        return Urgency([shake(row) for row in self.forward], [shake(row) for row in self.backward], patience)


class Listing:
    """One run of the scheduler: `codes`, the ranks' packed actions, and `end`, when the last one is over."""

    def __init__(self, job: Job, urgency: Urgency) -> None:
        self.job = job
        size, stages = job.num_microbatches, range(job.placement.num_stages)
        self.patience = urgency.patience
        self.forward_key, self.backward_key = urgency.forward, urgency.backward
        self.done = ([0] * len(stages), [0] * len(stages), [0] * len(stages))  # how many F, I, W of each stage
        self.forward_end = [[inf] * size for _ in stages]
        self.backward_end = [[inf] * size for _ in stages]
        ranks = job.placement.num_ranks
        self.held = [0.0] * ranks
        self.clock = [0.0] * ranks
        self.codes: list[list[int]] = [[] for _ in range(ranks)]
        self.asleep: set[int] = set()  # ranks that have nothing to wait for until another rank does something
        self.queue = [(0.0, rank) for rank in range(ranks)]
        while self.queue:
            self._turn(*heapq.heappop(self.queue))
        self.end = max(self.clock)
        self.complete = all(
            len(codes) == 3 * size * len(job.placement.stages_of(r)) for r, codes in enumerate(self.codes)
        )

    def _turn(self, now: float, rank: int) -> None:
        """A rank is free: begin something, or wait."""
        best, soon = self._urgent(now, rank)
        if best is _NOTHING:
            stage = self._owed(rank)
            if stage >= 0 and soon - now >= self.patience * self.job.backward_weight[stage]:
                best = (0.0, 2, stage)
            elif soon < inf:
                heapq.heappush(self.queue, (soon, rank))
                return
            else:
                self.clock[rank] = max(self.clock[rank], now if self.codes[rank] else 0.0)
                self.asleep.add(rank)
                return
        self._begin(now, rank, best[1], best[2])

    def _urgent(self, now: float, rank: int) -> tuple[tuple[float, int, int], float]:
        """The most urgent forward or input gradient that is ready; and when the next other one will be."""
        job = self.job
        forwards, inputs, _ = self.done
        room = job.limits[rank] * (1 + 1e-9) - self.held[rank]
        best, soon = _NOTHING, inf
        for stage in job.placement.stages_of(rank):
            ready = self._input_ready(stage)
            if ready <= now:
                best = min(best, (self.backward_key[stage][inputs[stage]], 1, stage))
            elif ready < soon:
                soon = ready
            if forwards[stage] < job.num_microbatches and job.costs.held_to_input[stage] + job.reserve[stage] <= room:
                ready = self._forward_ready(stage)
                if ready <= now:
                    best = min(best, (self.forward_key[stage][forwards[stage]], 0, stage))
                elif ready < soon:
                    soon = ready
        return best, soon

    def _forward_ready(self, stage: int) -> float:
        ready, number = 0.0, self.done[0][stage]
        for source, crossing in self.job.inputs[stage]:
            ready = max(ready, self.forward_end[source][number] + crossing)
        return ready

    def _input_ready(self, stage: int) -> float:
        number = self.done[1][stage]
        if number >= self.done[0][stage]:
            return inf
        ready = self.forward_end[stage][number]
        for source, crossing in self.job.gradients[stage]:
            ready = max(ready, self.backward_end[source][number] + crossing)
        return ready

    def _owed(self, rank: int) -> int:
        """The stage whose weight gradient is owed longest; -1: none is."""
        _, inputs, weights = self.done
        owing = [
            (weights[stage], -stage) for stage in self.job.placement.stages_of(rank) if weights[stage] < inputs[stage]
        ]
        return -min(owing)[1] if owing else -1

    def _begin(self, now: float, rank: int, kind: int, stage: int) -> None:
        job, number = self.job, self.done[kind][stage]
        self.done[kind][stage] += 1
        to_input, to_weight = job.costs.held_to_input[stage], job.costs.held_to_weight[stage]
        wakes: tuple[tuple[int, float], ...] = ()
        if kind == 0:
            end = self.forward_end[stage][number] = now + job.forward[stage]
            self.held[rank] += to_input
            self.codes[rank].append(forward(stage, number))
            wakes = job.gradients[stage]
        elif kind == 1:
            end = self.backward_end[stage][number] = now + job.backward_input[stage]
            self.held[rank] += to_weight - to_input
            self.codes[rank].append(backward_input(stage, number))
            wakes = job.inputs[stage]
        else:
            end = now + job.backward_weight[stage]
            self.held[rank] -= to_weight
            self.codes[rank].append(backward_weight(stage, number))
        self.clock[rank] = end
        heapq.heappush(self.queue, (end, rank))
        for woken, _ in wakes:
            other = job.placement.ranks[woken]
            if other in self.asleep:
                self.asleep.discard(other)
                heapq.heappush(self.queue, (max(self.clock[other], now), other))
