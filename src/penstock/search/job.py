"""SearchJob: what is to be scheduled, with every number that the scheduler asks for often worked out once.

The life of a microbatch is a chain: the forwards of all stages, then their input gradients in reverse. With S stages it has
2 S links, numbered along the chain. A *task* is one link for one microbatch, and is numbered `link * num_microbatches +
microbatch`; so the task that comes after task t in its microbatch's life is t + num_microbatches. Weight gradients are no
tasks: nobody waits for them, and each may be done from its input gradient on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from graphlib import TopologicalSorter
from math import inf

from penstock.errors import PlanError
from penstock.lower.chosen import one_a_rank
from penstock.plan import Op, Placement, Rules, StageGraph
from penstock.plan.actions import MICROBATCH_SHIFT, key_of, stage_of
from penstock.simulate import Costs, Timeline


def held_by_one(placement: Placement, costs: Costs) -> list[float]:
    """By rank: what its stages hold for a single microbatch, the largest."""
    largest, held = max(costs.microbatches or (1.0,)), costs.held_to_input
    return [largest * sum(held[stage] for stage in placement.stages_of(rank)) for rank in range(placement.num_ranks)]


@dataclass(frozen=True)
class SearchJob:
    """Stages on ranks, microbatches, costs, and what each rank may hold."""

    placement: Placement
    num_microbatches: int
    costs: Costs
    limits: tuple[float, ...]  # by rank

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
        return replace(self, costs=replace(self.costs, microbatches=tuple(self.sizes[number] for number in order)))

    @cached_property
    def num_links(self) -> int:
        return 2 * self.placement.num_stages

    def holds(self, timeline: Timeline) -> bool:
        """Whether no rank ever holds more than it may."""
        return all(peak <= limit * (1 + 1e-9) for peak, limit in zip(timeline.peak_memory, self.limits, strict=True))

    @cached_property
    def num_tasks(self) -> int:
        return self.num_links * self.num_microbatches

    @cached_property
    def stage_of_link(self) -> tuple[int, ...]:
        """By link. That forwards and input gradients are one chain, and in which order, follows from the rules."""
        stages = range(self.placement.num_stages)
        rules = Rules(StageGraph.chain(len(stages)), self.placement, lowered=False)
        keys = [key_of(op, stage) for op in (Op.F, Op.I) for stage in stages]
        return tuple(map(stage_of, TopologicalSorter({key: rules.needs(key) for key in keys}).static_order()))

    @cached_property
    def rank_of_link(self) -> tuple[int, ...]:
        return tuple(map(self.placement.rank_of, self.stage_of_link))

    @cached_property
    def backward_links(self) -> tuple[tuple[int, ...], ...]:
        """By rank: the links that are input gradients."""
        half = self.placement.num_stages
        return tuple(
            tuple(link for link in range(half, 2 * half) if self.rank_of_link[link] == rank)
            for rank in range(self.placement.num_ranks)
        )

    @cached_property
    def sizes(self) -> tuple[float, ...]:
        """By microbatch: how large it is."""
        return self.costs.microbatches or (1.0,) * self.num_microbatches

    def _per_task(self, links: Iterable[tuple[float, float]]) -> tuple[float, ...]:
        """For each link what its tasks cost by the size of their microbatch, and on top of that; as one number for each task."""
        return tuple(each * size + more for each, more in links for size in self.sizes)

    def _times(self, forward: Sequence[float], gradient: Sequence[float]) -> tuple[float, ...]:
        """By task: a time on its rank, of its stage's forward or gradient."""
        half, slow = self.placement.num_stages, self.costs.ranks or (1.0,) * self.placement.num_ranks
        stages = [(gradient if link >= half else forward)[stage] for link, stage in enumerate(self.stage_of_link)]
        times = (time * slow[rank] for time, rank in zip(stages, self.rank_of_link, strict=True))
        return self._per_task((time, self.costs.overhead) for time in times)

    def _sizes(self, held: Sequence[float]) -> tuple[float, ...]:
        return self._per_task((held[stage], 0.0) for stage in self.stage_of_link)

    @cached_property
    def time(self) -> tuple[float, ...]:
        """By task: how long it takes."""
        return self._times(self.costs.forward, self.costs.backward_input)

    @cached_property
    def weight_time(self) -> tuple[float, ...]:
        """By task: how long the weight gradient of its stage takes."""
        return self._times(self.costs.backward_weight, self.costs.backward_weight)

    @cached_property
    def whole_time(self) -> tuple[float, ...]:
        """By task: how long the backward of its stage takes in one piece."""
        whole = [self.costs.time(Op.B, stage) for stage in range(self.placement.num_stages)]
        return self._times(whole, whole)

    @cached_property
    def merges(self) -> bool:
        """Whether a backward in one piece takes less time than its halves, or holds less than between them."""
        back = range(self.num_tasks // 2, self.num_tasks)
        return any(
            self.whole_time[task] < (self.time[task] + self.weight_time[task]) * (1 - 1e-9)
            or self.kept[task] > self.held[task]
            for task in back
        )

    @cached_property
    def crossing(self) -> tuple[float, ...]:
        """By task: how long its result takes to where the next task of its microbatch is done; 0 on the same rank."""
        return self._per_task(map(self._crossing, range(self.num_links)))

    def _crossing(self, link: int) -> tuple[float, float]:
        """The time of the bytes after a link, and the latency."""
        if link + 1 == self.num_links or self.rank_of_link[link] == self.rank_of_link[link + 1]:
            return 0.0, 0.0
        way = self.costs.link(self.rank_of_link[link], self.rank_of_link[link + 1])
        before = min(self.stage_of_link[link : link + 2])  # a gradient is as large as the output
        return self.costs.transfer(way, before), way.latency

    @cached_property
    def held(self) -> tuple[float, ...]:
        """By task: what its stage holds for the microbatch from the forward to the input gradient."""
        return self._sizes(self.costs.held_to_input)

    @cached_property
    def kept(self) -> tuple[float, ...]:
        """By task: what its stage still holds from the input gradient to the weight gradient."""
        return self._sizes(self.costs.held_to_weight)

    @cached_property
    def reserved(self) -> tuple[float, ...]:
        """By task: the memory without which the list scheduler begins no forward. What is kept for the weight gradient may be
        more than what was held before, and there must be room for it then.
        """
        return tuple(map(max, self.held, self.kept))

    @cached_property
    def codes(self) -> tuple[int, ...]:
        """By task: the packed action."""
        half = self.num_tasks // 2
        return tuple(self.code(Op.I if task >= half else Op.F, task) for task in range(self.num_tasks))

    def code(self, op: Op, task: int) -> int:
        """The packed action that is this op for the stage and the microbatch of the task."""
        link, microbatch = divmod(task, self.num_microbatches)
        return key_of(op, self.stage_of_link[link]) | microbatch << MICROBATCH_SHIFT

    @cached_property
    def pace(self) -> float:
        """The time that the busiest rank has for one microbatch, on average."""
        work = [0.0] * self.placement.num_ranks
        half = self.num_tasks // 2
        for task, time in enumerate(self.time):
            more = self.weight_time[task] if task >= half else 0.0
            work[self.rank_of_link[task // self.num_microbatches]] += time + more
        return max(work) / self.num_microbatches
