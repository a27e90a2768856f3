"""The plan of a schedule, for the stages that it is given; and another one between two steps, found by simulating what is known
with measured costs, and taken by all ranks at once.

plan = better_plan(schedule.plan, costs, gain=0.05)      # None: there is none that is worth it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from os import PathLike

from penstock.backward.offload_targets import OffloadTarget
from penstock.comm.transport import Transport
from penstock.errors import PlanError, RunError, StageError
from penstock.lower import lower
from penstock.lower import offload as offload_pass
from penstock.lower import recompute as recompute_pass
from penstock.lower.stage_selection import Stages
from penstock.plan import Plan, StageGraph, dumps, loads
from penstock.plan.actions import OP, microbatch_of, parts, stage_of
from penstock.plan.ops import WEIGHT_GRADIENTS
from penstock.schedules import all_schedules, get_schedule
from penstock.simulate import Costs, simulate
from penstock.stage.pipeline_stage import PipelineStage

Sparing = Stages | bool | str
"""What `recompute=` and `offload=` take: True, stages, {stage: [microbatches]}; of `offload` also "host" and "disk"."""
Place = str | PathLike[str] | OffloadTarget | None
"""What `offload_to=` takes: a folder, a place of the user's own, or nothing for the memory of the host."""


def plan_of_recipe(recipe: str, stage: PipelineStage, num_microbatches: int) -> Plan:
    """The plan of a registered schedule, for a pipeline as large as that of this stage."""
    per_rank, rest = divmod(stage.num_stages, stage.group_size)
    if rest:
        raise PlanError(
            f"{stage.num_stages} stages over {stage.group_size} ranks; {recipe} needs the same number on every rank"
        )
    return get_schedule(recipe)(stage.group_size, num_microbatches, stages_per_rank=per_rank)


def placed(plan: Plan, stages: Sequence[PipelineStage], recompute: Sparing, offload: Sparing) -> Plan:
    """The plan for the graph of these stages, checked against where they are, with what the options ask for."""
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
    return sparing(plan, recompute, offload)


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


def better_plan(plan: Plan, costs: Costs, *, gain: float, others: Iterable[Plan] = ()) -> Plan | None:
    """The fastest plan for the same stages in the same places, if its step is shorter by at least this share.

        better_plan(plan, measured_costs(timelines, known), gain=0.05)

    No rank may hold more than now, by these costs. And each stage must add up the weight gradients of its microbatches in the
    order of now, so that the same numbers come out. Looked at are all schedules that have a name, and `others`. A plan that
    recomputes or offloads, or has its messages already, stays as it is.
    """
    if plan.is_lowered or not plan.has_backward or plan.rules.chosen:
        return None
    now = simulate(lower(plan), costs)
    best, limit = None, now.makespan * (1 - gain)
    order = weight_order(plan)
    for other in (*_known(plan), *others):
        if weight_order(other) != order:
            continue
        timeline = simulate(lower(other), costs)
        fits = all(peak <= most * (1 + 1e-9) for peak, most in zip(timeline.peak_memory, now.peak_memory, strict=True))
        if fits and timeline.makespan <= limit:
            best, limit = other, timeline.makespan
    return best


def agreed_plan(
    plan: Plan, costs: Costs, transport: Transport, *, gain: float, search: Callable[[Plan], Iterable[Plan]] | None
) -> Plan | None:
    """The better plan that the first rank finds, on every rank; None: there is none. If it cannot look for one, all raise."""

    def find() -> tuple[str, str]:
        if not 0 <= gain < 1:
            raise RunError(f"replan(gain={gain!r}); expected a share of a step from 0 up and below 1, such as 0.05")
        found = better_plan(plan, costs, gain=gain, others=() if search is None else search(plan))
        return ("", "") if found is None else (found.name, dumps(found))

    name, text = transport.collectives.broadcast("take another plan", find)
    return replace(plan, codes=loads(text).codes, name=name, family=None) if text else None


def weight_order(plan: Plan) -> dict[int, list[int]]:
    """By stage: the microbatches in the order in which their weight gradients are added up.

    >>> weight_order(Plan.of([["0F0", "0F1", "0B0", "0B1"]]))
    {0: [0, 1]}
    """
    found: dict[int, list[int]] = {stage: [] for stage in range(plan.num_stages)}
    for codes in plan.codes:
        for code in codes:
            for part in parts(code):
                if part & OP in WEIGHT_GRADIENTS:
                    found[stage_of(part)].append(microbatch_of(part))
    return found


def _known(plan: Plan) -> Iterator[Plan]:
    """The named schedules that fit the stages where they are."""
    per_rank, rest = divmod(plan.num_stages, plan.num_ranks)
    for recipe in () if rest else all_schedules():
        if recipe.name not in ("forward", plan.name) and recipe.stages_per_rank in (None, per_rank):
            made = recipe(plan.num_ranks, plan.num_microbatches, stages_per_rank=per_rank)
            if made.placement == plan.placement:
                yield made.with_graph(plan.graph)
