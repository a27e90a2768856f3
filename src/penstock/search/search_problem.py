"""SearchJob: what is to be scheduled, with every number that the scheduler asks for often worked out once.

The life of a microbatch is a chain: the forwards of all stages, then their input gradients in reverse. With S stages it has
2 S links, numbered along the chain. A *task* is one link for one microbatch, and is numbered `link * num_microbatches +
microbatch`; so the task that comes after task t in its microbatch's life is t + num_microbatches. Weight gradients are no
tasks: nobody waits for them, and each may be done from its input gradient on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from math import inf

from penstock.errors import PlanError
from penstock.lower.stage_selection import one_a_rank
from penstock.plan import Op, Placement
from penstock.plan.action_positions import column
from penstock.plan.actions import key_of, with_op
from penstock.simulate import Costs, Timeline


def held_by_one(placement: Placement, costs: Costs) -> list[float]:
    """By rank: what its stages hold for a single microbatch, the largest."""
    largest, held = max(costs.microbatches or (1.0,)), costs.held_to_input
    return [largest * sum(held[stage] for stage in placement.stages_of(rank)) for rank in range(placement.num_ranks)]


class SearchJob:
    """Stages on ranks, microbatches, costs, and what each rank may hold."""

    def __init__(self, placement: Placement, num_microbatches: int, costs: Costs, limits: tuple[float, ...]) -> None:
        self.placement, self.num_microbatches, self.costs = placement, num_microbatches, costs
        self.limits = limits  # by rank
        self.sizes = costs.microbatches or (1.0,) * num_microbatches  # by microbatch: how large it is
        half = placement.num_stages
        stages = range(half)
        self.num_links = 2 * half
        self.num_tasks = self.num_links * num_microbatches
        self.stage_of_link: tuple[int, ...] = (*stages, *reversed(stages))
        self.rank_of_link = tuple(map(placement.rank_of, self.stage_of_link))
        # By rank: the links that are input gradients.
        ranks, gradients = range(placement.num_ranks), range(half, self.num_links)
        self.backward_links = [[link for link in gradients if self.rank_of_link[link] == rank] for rank in ranks]
        # By task: the packed action, how long it takes, and how long the weight gradient of its stage does, or the backward of
        # its stage in one piece.
        keys = [key_of(Op.F if link < half else Op.I, stage) for link, stage in enumerate(self.stage_of_link)]
        self.codes = tuple(chain.from_iterable(column(key, num_microbatches) for key in keys))
        self.time = self._times(costs.forward, costs.backward_input)
        self.weight_time = self._times(costs.backward_weight, costs.backward_weight)
        whole = [costs.time(Op.B, stage) for stage in stages]
        self.whole_time = self._times(whole, whole)
        # By task: how long its result takes to where the next task of its microbatch is done; 0 on the same rank.
        self.crossing = self._per_task(map(self._crossing, range(self.num_links)))
        # By task: what its stage holds for the microbatch from the forward to the input gradient, and what of it from there to
        # the weight gradient.
        self.held = self._per_task((costs.held_to_input[stage], 0.0) for stage in self.stage_of_link)
        self.kept = self._per_task((costs.held_to_weight[stage], 0.0) for stage in self.stage_of_link)
        # By task: the memory without which the list scheduler begins no forward. What is kept for the weight gradient may be
        # more than what was held before, and there must be room for it then.
        self.reserved = tuple(map(max, self.held, self.kept))
        back = range(self.num_tasks // 2, self.num_tasks)  # the tasks that are input gradients
        # Whether a backward in one piece takes less time than its halves, or holds less than between them.
        self.merges = any(
            self.whole_time[task] < (self.time[task] + self.weight_time[task]) * (1 - 1e-9)
            or self.kept[task] > self.held[task]
            for task in back
        )
        work = [0.0 for _ in ranks]
        for task, time in enumerate(self.time):
            more = self.weight_time[task] if task in back else 0.0
            work[self.rank_of_link[task // num_microbatches]] += time + more
        self.pace = max(work) / num_microbatches  # the time that the busiest rank has for one microbatch, on average

    @classmethod
    def of(
        cls, placement: Placement, num_microbatches: int, costs: Costs, memory_limit: float | Sequence[float] | None
    ) -> SearchJob:
        """Raises PlanError if a rank cannot even hold one microbatch."""
        limits = one_a_rank(inf if memory_limit is None else memory_limit, placement.num_ranks)
        costs.check_sizes(placement.num_stages, placement.num_ranks, num_microbatches)
        for rank, least in enumerate(held_by_one(placement, costs)):
            if not limits[rank] >= least * (1 - 1e-9):  # nor is nan
                raise PlanError(
                    f"memory_limit={limits[rank]:g} on rank {rank}, whose stages hold {least:g} for a single microbatch; "
                    "give more, cut the microbatches smaller, or spread the stages over more ranks"
                )
        return cls(placement, num_microbatches, costs, limits)

    def in_order(self, order: tuple[int, ...]) -> SearchJob:
        """The job whose k-th microbatch is that of this job with the k-th number."""
        costs = replace(self.costs, microbatches=tuple(self.sizes[number] for number in order))
        return SearchJob(self.placement, self.num_microbatches, costs, self.limits)

    def holds(self, timeline: Timeline) -> bool:
        """Return True if no rank exceeds its memory limit."""
        return all(peak <= limit * (1 + 1e-9) for peak, limit in zip(timeline.peak_memory, self.limits, strict=True))

    def code(self, op: Op, task: int) -> int:
        """The packed action that is this op for the stage and the microbatch of the task."""
        return with_op(self.codes[task], op)

    def _per_task(self, links: Iterable[tuple[float, float]]) -> tuple[float, ...]:
        """For each link what its tasks cost by the size of their microbatch, and on top of that; as one number for each task."""
        return tuple(each * size + more for each, more in links for size in self.sizes)

    def _times(self, forward: Sequence[float], gradient: Sequence[float]) -> tuple[float, ...]:
        """By task: a time on its rank, of its stage's forward or gradient."""
        half, slow = self.placement.num_stages, self.costs.ranks or (1.0,) * self.placement.num_ranks
        stages = [(gradient if link >= half else forward)[stage] for link, stage in enumerate(self.stage_of_link)]
        times = (time * slow[rank] for time, rank in zip(stages, self.rank_of_link, strict=True))
        return self._per_task((time, self.costs.overhead) for time in times)

    def _crossing(self, link: int) -> tuple[float, float]:
        """The time of the bytes after a link, and the latency."""
        if link + 1 == self.num_links or self.rank_of_link[link] == self.rank_of_link[link + 1]:
            return 0.0, 0.0
        way = self.costs.link(self.rank_of_link[link], self.rank_of_link[link + 1])
        before = min(self.stage_of_link[link : link + 2])  # a gradient is as large as the output
        return self.costs.transfer(way, before), way.latency
