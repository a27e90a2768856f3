"""A rank that is slow for good gets fewer layers: what measured steps say of each rank, and the cut that suits it.

profile = slower_ranks(choice, timelines, gain=0.05)      # None: no other cut is worth it
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from penstock.balance import Profile
from penstock.front.candidates import fastest_cut
from penstock.front.choice import Choice
from penstock.front.ends import Ends
from penstock.front.stage_costs import stage_costs
from penstock.simulate import Costs, Timeline, measured_costs


def slower_ranks(choice: Choice, timelines: Sequence[Timeline], *, gain: float) -> Profile | None:
    """The profile with how slow each rank is, if a cut that minds it makes a step shorter by at least this share.

    A rank is as slow as its stages are in these steps, beside what the profile says of their layers. Whoever is given the profile
    cuts by it: `Pipeline(profile=...)`.
    """
    times = rank_times(choice, timelines)
    now = replace(choice, machine=replace(choice.machine, ranks=times), calibrated=None)
    then = fastest_cut(replace(now, budgets=()))
    if then.boundaries == choice.boundaries or then.timeline.makespan > (1 - gain) * now.timeline.makespan:
        return None
    return replace(choice.profile, metadata={**choice.profile.metadata, "rank_times": list(times)})


def agreed_recut(choice: Choice, timelines: Sequence[Timeline], ends: Ends, *, gain: float) -> Profile | None:
    """The same on every rank, by the timelines of the first one."""

    def decide() -> str:
        found = slower_ranks(choice, timelines, gain=gain)
        return "" if found is None else found.dumps()

    text = ends.decide("how to cut the model from now on", decide)
    return Profile.loads(text) if text else None


def rank_times(choice: Choice, timelines: Sequence[Timeline]) -> tuple[float, ...]:
    """How many times as long each rank takes for its layers as the rank in the middle does."""
    plan = choice.plan
    known = stage_costs(choice.profile, choice.bounds, replace(choice.machine, ranks=None), plan.placement)
    measured = measured_costs(timelines, known)
    ratios = [
        sum(_of_stage(measured, stage) for stage in stages) / (sum(_of_stage(known, stage) for stage in stages) or 1.0)
        for stages in map(plan.placement.stages_of, range(plan.num_ranks))
    ]
    usual = statistics.median_low(ratios) or 1.0
    return tuple(round(ratio / usual, 3) for ratio in ratios)


def _of_stage(costs: Costs, stage: int) -> float:
    whole = costs.backward_input[stage] + costs.backward_weight[stage]
    return costs.forward[stage] + (whole if costs.backward is None else costs.backward[stage])
