"""Job: what is to be scheduled, with every number that the scheduler asks for often worked out once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from penstock.errors import PlanError
from penstock.plan import Op, Placement, Rules, StageGraph
from penstock.plan.actions import key_of, stage_of
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
    def forward(self) -> tuple[float, ...]:
        return tuple(time + self.costs.overhead for time in self.costs.forward)

    @cached_property
    def backward_input(self) -> tuple[float, ...]:
        return tuple(time + self.costs.overhead for time in self.costs.backward_input)

    @cached_property
    def backward_weight(self) -> tuple[float, ...]:
        return tuple(time + self.costs.overhead for time in self.costs.backward_weight)

    @cached_property
    def crossing(self) -> tuple[float, ...]:
        """By stage: how long its output takes to the next stage, and that one's gradient back; 0 on the same rank."""
        ranks, costs = self.placement.ranks, self.costs
        sizes = costs.output_bytes if costs.bandwidth is not None else None
        times = []
        for stage in range(self.placement.num_stages - 1):
            size = 0.0 if sizes is None or costs.bandwidth is None else sizes[stage] / costs.bandwidth
            times.append(0.0 if ranks[stage] == ranks[stage + 1] else costs.latency + size)
        return (*times, 0.0)

    @cached_property
    def inputs(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """By stage: the stages whose forward its own forward needs, and how long their values are under way."""
        return self._arrivals(Op.F)

    @cached_property
    def gradients(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """By stage: the stages whose input gradient its own needs, and how long their values are under way."""
        return self._arrivals(Op.I)

    def _arrivals(self, op: Op) -> tuple[tuple[tuple[int, float], ...], ...]:
        stages = range(self.placement.num_stages)
        rules = Rules(StageGraph.chain(len(stages)), self.placement, lowered=False)
        sources = [[stage_of(key) for key in rules.arrivals(key_of(op, stage))] for stage in stages]
        return tuple(tuple((s, self.crossing[min(s, stage)]) for s in found) for stage, found in enumerate(sources))

    @cached_property
    def place(self) -> tuple[int, ...]:
        """By stage: which of its rank's stages it is, from 0."""
        return tuple(self.placement.stages_of(rank).index(stage) for stage, rank in enumerate(self.placement.ranks))

    @cached_property
    def reserve(self) -> tuple[float, ...]:
        """By stage: what its rank's later stages hold for one microbatch.

        A forward leaves that much free. So the oldest microbatch can always go on, and the memory cannot fill up with
        microbatches that are half-way.
        """
        held = self.costs.held_to_input
        stages_of = self.placement.stages_of
        return tuple(
            sum(held[later] for later in stages_of(rank) if later > stage)
            for stage, rank in enumerate(self.placement.ranks)
        )
