"""The plan of a schedule, for the stages that it is given."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import PlanError
from penstock.plan import Plan, StageGraph
from penstock.schedules import get_schedule
from penstock.stage.pipeline_stage import PipelineStage


def plan_of_recipe(recipe: str, stage: PipelineStage, num_microbatches: int) -> Plan:
    """The plan of a registered schedule, for a pipeline as large as that of this stage."""
    per_rank, rest = divmod(stage.num_stages, stage.group_size)
    if rest:
        raise PlanError(
            f"{stage.num_stages} stages over {stage.group_size} ranks; {recipe} needs the same number on every rank"
        )
    return get_schedule(recipe)(stage.group_size, num_microbatches, stages_per_rank=per_rank)


def placed(plan: Plan, stages: Sequence[PipelineStage]) -> Plan:
    """The plan for the graph of these stages, checked against where they are."""
    first = stages[0]
    if first.routes is not None:
        plan = plan.with_graph(StageGraph.of(plan.num_stages, first.routes.edges))
    if plan.num_stages != first.num_stages or plan.num_ranks != first.group_size:
        raise PlanError(
            f"the plan is for {plan.num_stages} stages on {plan.num_ranks} ranks, but there are {first.num_stages} stages "
            f"on {first.group_size} ranks"
        )
    here, there = tuple(stage.stage_index for stage in stages), plan.placement.stages_of(first.group_rank)
    if here != there:
        raise PlanError(
            f"rank {first.group_rank} holds stages {list(here)}, but {plan.name or 'the plan'} places {list(there)} there; "
            "make the stages for those"
        )
    return plan
