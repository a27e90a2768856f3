"""Plans for stages that are there: those that the user made, and evaluations of few rows."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import PlanError
from penstock.front.ends import Ends
from penstock.front.request import Built
from penstock.plan import Action, Op, Placement, Plan
from penstock.schedules import Recipe, all_schedules, get_schedule
from penstock.simulate import simulate
from penstock.stage.pipeline_stage import PipelineStage


def adopt(stages: Sequence[PipelineStage], schedule: str | Plan | Recipe, microbatches: int, ends: Ends) -> Built:
    """A plan for stages that the user made."""
    num_stages = stages[0].num_stages
    ranks = [0] * num_stages
    for rank, held in enumerate(ends.gather("the stages of each rank", [stage.stage_index for stage in stages])):
        for index in held:
            ranks[index] = rank
    placement = Placement.of(ranks)
    return Built(list(stages), _plan_for(placement, schedule, microbatches), None, None)


def _plan_for(placement: Placement, schedule: str | Plan | Recipe, microbatches: int) -> Plan:
    if isinstance(schedule, Plan):
        return schedule
    per_rank, rest = divmod(placement.num_stages, placement.num_ranks)
    if rest:
        raise PlanError(
            f"{placement.num_stages} stages over {placement.num_ranks} ranks; give a plan of your own: schedule=plan"
        )
    wanted = (
        list(all_schedules())
        if schedule == "auto"
        else [schedule if isinstance(schedule, Recipe) else get_schedule(schedule)]
    )
    plans = [
        recipe(placement.num_ranks, microbatches, stages_per_rank=per_rank)
        for recipe in wanted
        if recipe.stages_per_rank in (None, per_rank) and (recipe.name != "forward" or schedule != "auto")
    ]
    fitting = [plan for plan in plans if plan.placement == placement]
    if not fitting:
        raise PlanError(
            f"no schedule {schedule!r} for stages placed as {placement.ranks}; schedules place them round the ranks (loop: "
            f"{Placement.loop(placement.num_ranks, per_rank).ranks}) or there and back "
            f"(v: {Placement.v(placement.num_ranks, per_rank).ranks})"
        )
    return min(fitting, key=lambda plan: (simulate(plan).makespan, max(simulate(plan).peak_memory)))


def forward_plan(placement: Placement, num_microbatches: int) -> Plan:
    """Every stage's forward of one microbatch before the next.

    >>> print(*forward_plan(Placement.v(2), 1).lines(), sep="\\n")
    rank 0: 0F0 3F0
    rank 1: 1F0 2F0
    """
    rows = [
        [
            Action(Op.F, stage, microbatch)
            for microbatch in range(num_microbatches)
            for stage in placement.stages_of(rank)
        ]
        for rank in range(placement.num_ranks)
    ]
    return Plan.of(rows, placement=placement, num_microbatches=num_microbatches, name="forward")
