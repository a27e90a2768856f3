"""Another plan between two steps: found by simulating what is known with measured costs, taken by all ranks at once.

plan = better_plan(schedule.plan, costs, gain=0.05)      # None: there is none that is worth it
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from penstock.comm.transport import Transport
from penstock.errors import RunError
from penstock.lower import lower
from penstock.plan import Plan, dumps, loads
from penstock.plan.actions import OP, microbatch_of, parts, stage_of
from penstock.plan.ops import WEIGHT_GRADIENTS
from penstock.schedules import all_schedules
from penstock.simulate import Costs, simulate


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
    name, text, wrong = "", "", ""
    problem: Exception | None = None
    if transport.rank == 0:
        try:
            if not 0 <= gain < 1:
                raise RunError(f"replan(gain={gain!r}); expected a share of a step from 0 up and below 1, such as 0.05")
            found = better_plan(plan, costs, gain=gain, others=() if search is None else search(plan))
            name, text = ("", "") if found is None else (found.name, dumps(found))
        except Exception as error:  # noqa: BLE001  the other ranks wait for this one
            problem, wrong = error, f"{type(error).__name__}: {error}"
    posts = transport.gather("the plan from now on", json.dumps([name, text, wrong]).encode())
    name, text, wrong = json.loads(posts[0])
    if wrong:
        raise problem or RunError(f"rank 0 could not look for another plan: {wrong}")
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
