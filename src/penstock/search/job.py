"""Job: what is to be scheduled, with every number that the scheduler asks for often worked out once.

The life of a microbatch is a chain: the forwards of all stages, then their input gradients in reverse. With S stages it has
2 S links, numbered along the chain. A *task* is one link for one microbatch, and is numbered `link * num_microbatches +
microbatch`; so the task that comes after task t in its microbatch's life is t + num_microbatches. Weight gradients are no
tasks: nobody waits for them, and each may be done from its input gradient on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from penstock.errors import PlanError
from penstock.plan import Placement
from penstock.plan.actions import backward_input, backward_weight, forward
from penstock.simulate import Costs


@dataclass(frozen=True)
class Job:
    """Stages on ranks, microbatches, costs, and what each rank may hold."""

    placement: Placement
    num_microbatches: int
    costs: Costs
    limits: tuple[float, ...]  # by rank

    @classmethod
    def of(
        cls, placement: Placement, num_microbatches: int, costs: Costs, memory_limit: float | Sequence[float] | None
    ) -> Job:
        """Raises PlanError if a rank cannot even hold one microbatch."""
        ranks = range(placement.num_ranks)
        if memory_limit is None:
            limits = tuple(inf for _ in ranks)
        elif isinstance(memory_limit, Sequence):
            limits = tuple(memory_limit)
        else:
            limits = tuple(memory_limit for _ in ranks)
        if len(limits) != placement.num_ranks:
            raise PlanError(
                f"memory_limit has {len(limits)} numbers for {placement.num_ranks} ranks; expected one a rank"
            )
        job = cls(placement, num_microbatches, costs, limits)
        for rank in ranks:
            least = sum(costs.held_to_input[stage] for stage in placement.stages_of(rank))
            if limits[rank] < least * (1 - 1e-9):
                raise PlanError(
                    f"memory_limit={limits[rank]:g} on rank {rank}, whose stages hold {least:g} for a single microbatch; "
                    "give more, cut the microbatches smaller, or spread the stages over more ranks"
                )
        return job

    @cached_property
    def num_links(self) -> int:
        return 2 * self.placement.num_stages

    @cached_property
    def num_tasks(self) -> int:
        return self.num_links * self.num_microbatches

    @cached_property
    def stage_of_link(self) -> tuple[int, ...]:
        stages = range(self.placement.num_stages)
        return (*stages, *reversed(stages))

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

    def _per_task(self, value: Callable[[int], float]) -> tuple[float, ...]:
        """A number of a link, for each of its tasks."""
        return tuple(value(link) for link in range(self.num_links) for _ in range(self.num_microbatches))

    @cached_property
    def time(self) -> tuple[float, ...]:
        """By task: how long it takes."""
        costs, half = self.costs, self.placement.num_stages
        both = (costs.forward, costs.backward_input)
        return self._per_task(lambda link: both[link >= half][self.stage_of_link[link]] + costs.overhead)

    @cached_property
    def weight_time(self) -> tuple[float, ...]:
        """By task: how long the weight gradient of its stage takes."""
        return self._per_task(lambda link: self.costs.backward_weight[self.stage_of_link[link]] + self.costs.overhead)

    @cached_property
    def crossing(self) -> tuple[float, ...]:
        """By task: how long its result takes to where the next task of its microbatch is done; 0 on the same rank."""
        return self._per_task(self._crossing)

    def _crossing(self, link: int) -> float:
        if link + 1 == self.num_links or self.rank_of_link[link] == self.rank_of_link[link + 1]:
            return 0.0
        costs = self.costs
        if costs.bandwidth is None or costs.output_bytes is None:
            return costs.latency
        before = min(self.stage_of_link[link], self.stage_of_link[link + 1])  # a gradient is as large as the output
        return costs.latency + costs.output_bytes[before] / costs.bandwidth

    @cached_property
    def held(self) -> tuple[float, ...]:
        """By task: what its stage holds for the microbatch from the forward to the input gradient."""
        return self._per_task(lambda link: self.costs.held_to_input[self.stage_of_link[link]])

    @cached_property
    def kept(self) -> tuple[float, ...]:
        """By task: what its stage still holds from the input gradient to the weight gradient."""
        return self._per_task(lambda link: self.costs.held_to_weight[self.stage_of_link[link]])

    @cached_property
    def codes(self) -> tuple[int, ...]:
        """By task: the packed action."""
        half, numbers = self.placement.num_stages, range(self.num_microbatches)
        pack = (forward, backward_input)
        return tuple(
            pack[link >= half](stage, number) for link, stage in enumerate(self.stage_of_link) for number in numbers
        )

    def weight_code(self, task: int) -> int:
        """The packed weight gradient that the task, an input gradient, leaves to be done."""
        link, microbatch = divmod(task, self.num_microbatches)
        return backward_weight(self.stage_of_link[link], microbatch)

    @cached_property
    def pace(self) -> float:
        """The time that the busiest rank has for one microbatch."""
        costs = self.costs
        each = zip(costs.forward, costs.backward_input, costs.backward_weight, strict=True)
        times = [sum(three) + 3 * costs.overhead for three in each]
        return max(sum(times[s] for s in self.placement.stages_of(r)) for r in range(self.placement.num_ranks))
