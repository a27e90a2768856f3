"""The plan of a schedule, for the stages that it is given."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike

from penstock.errors import PlanError, StageError
from penstock.lower import offload as offload_pass
from penstock.lower import recompute as recompute_pass
from penstock.lower.chosen import Stages
from penstock.plan import Plan, StageGraph
from penstock.schedules import get_schedule
from penstock.stage.elsewhere import Elsewhere
from penstock.stage.pipeline_stage import PipelineStage

Sparing = Stages | bool | str
"""What `recompute=` and `offload=` take: True, stages, {stage: [microbatches]}; of `offload` also "host" and "disk"."""
Place = str | PathLike[str] | Elsewhere | None
"""What `offload_to=` takes: a folder, a place of the user's own, or nothing for the memory of the host."""


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


def check_flags(options: object, *names: str) -> None:
    """Whether these attributes are True or False, or numbers in their place."""
    for name in names:
        value = getattr(options, name)
        if not isinstance(value, bool | int):
            raise StageError(f"{name} is a {type(value).__name__}; expected True or False")


def check_sparing(recompute: Sparing, offload: Sparing, offload_to: Place) -> None:
    """Whether the options that make stages hold less say what they mean: words name a place for all stages."""
    if isinstance(recompute, str):
        raise PlanError(f"recompute={recompute!r}; expected True, stages, or {{stage: [microbatches]}}")
    if offload_to == "":
        raise PlanError('offload_to=""; expected the name of a folder ("." is the one where you are), or nothing')
    if not isinstance(offload, str):
        return
    if offload not in ("host", "disk"):
        raise PlanError(f'offload={offload!r}; expected "host", "disk", True, stages, or {{stage: [microbatches]}}')
    if offload == "disk" and offload_to is None:
        raise PlanError('offload="disk" without a folder; expected offload_to="folder", where the files are to be')
    if offload == "host" and isinstance(offload_to, str | PathLike):
        raise PlanError(f'offload="host" and offload_to={str(offload_to)!r}; expected offload="disk", or no folder')


def sparing(plan: Plan, recompute: Sparing, offload: Sparing) -> Plan:
    """The plan with what the options `recompute` and `offload` ask for.

    >>> from penstock.schedules import get_schedule
    >>> print(*sparing(get_schedule("1f1b")(2, 2), [0], False).lines(), sep="\\n")
    rank 0: 0F0 0F1 0R0 0B0 0R1 0B1
    rank 1: 1F0 1B0 1F1 1B1
    """
    for change, stages in ((recompute_pass, recompute), (offload_pass, offload)):
        if stages is not False:
            plan = change(plan, None if stages is True or isinstance(stages, str) else stages)
    return plan
