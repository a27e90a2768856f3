"""What comes into question: every plan that the user's wishes allow, and the best cut of the model for each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.balance import Profile, balance
from penstock.errors import BalanceError, PlanError
from penstock.front.choice import Choice
from penstock.front.stage_costs import FREE, Machine
from penstock.plan import Placement, Plan
from penstock.schedules import Recipe, all_schedules, get_schedule

_MOST_STAGES_PER_RANK = 4


@dataclass(frozen=True)
class Wishes:
    """What the user fixed, and what was measured of the machine."""

    num_ranks: int
    num_microbatches: int
    schedule: str = "auto"
    plan: Plan | None = None  # a plan of the user's own
    num_stages: int | None = None
    placement: Placement | str | None = None
    memory_limit: int | Sequence[int] | None = None
    optimizer_bytes: float = 2.0  # for each byte of parameters
    machine: Machine = FREE
    offload: bool = False  # whether stages may be offloaded to keep to the limit
    budgets: bool = False  # whether stages are compiled, and may be given a budget of memory to keep to the limit
    microbatches: tuple[float, ...] | None = None  # how large each is beside the others; None: they are alike

    @property
    def limits(self) -> tuple[float, ...]:
        """Bytes that each rank may hold."""
        limit = math.inf if self.memory_limit is None else self.memory_limit
        limits = tuple(limit) if isinstance(limit, Sequence) else (limit,) * self.num_ranks
        if len(limits) != self.num_ranks:
            raise BalanceError(f"memory_limit has {len(limits)} entries, expected {self.num_ranks}: one for each rank")
        return limits

    @property
    def is_given(self) -> bool:
        """Whether there is a schedule that must be taken."""
        return self.schedule != "auto" or self.plan is not None


def plans(profile: Profile, wishes: Wishes) -> Iterator[Plan]:
    """Every plan that the wishes allow."""
    if wishes.plan is not None:
        yield wishes.plan
        return
    recipes = all_schedules() if wishes.schedule == "auto" else [get_schedule(wishes.schedule)]
    for recipe in recipes:
        if wishes.schedule == "auto" and recipe.name == "forward":
            continue
        for per_rank in _stages_per_rank(recipe, profile, wishes):
            plan = recipe(wishes.num_ranks, wishes.num_microbatches, stages_per_rank=per_rank)
            if _placed(plan, wishes):
                yield plan


def _stages_per_rank(recipe: Recipe, profile: Profile, wishes: Wishes) -> Sequence[int]:
    if wishes.num_stages is not None:
        per_rank, rest = divmod(wishes.num_stages, wishes.num_ranks)
        if rest:
            raise PlanError(
                f"{wishes.num_stages} stages over {wishes.num_ranks} ranks; expected a multiple of {wishes.num_ranks}"
            )
        if recipe.stages_per_rank in (None, per_rank):
            return (per_rank,)
        if wishes.schedule != "auto":
            recipe.sizes(wishes.num_ranks, wishes.num_microbatches, per_rank)  # raises, and says what would do
        return ()
    if recipe.stages_per_rank is not None:
        return (recipe.stages_per_rank,)
    if wishes.schedule != "auto":
        return (recipe.default_stages_per_rank,)
    most = min(_MOST_STAGES_PER_RANK, len(profile.layers) // wishes.num_ranks)
    return range(2, most + 1)


def _placed(plan: Plan, wishes: Wishes) -> bool:
    if wishes.placement is None:
        return True
    if isinstance(wishes.placement, Placement):
        return plan.placement == wishes.placement
    same_anyway = (
        wishes.schedule != "auto" and plan.num_stages == plan.num_ranks
    )  # one stage a rank: loop and v are one
    return plan.placement.kind == wishes.placement or same_anyway


def fastest_cut(plan: Plan, profile: Profile, wishes: Wishes) -> Choice:
    """The best cut by what the ranks compute; or, where some links are narrower than others, with what crosses them weighed as
    well, if the step is shorter with that.
    """
    machine = wishes.machine
    weighed: list[dict[str, Any]] = [{}]
    if any(link.bandwidth is not None for link in machine.links):
        weighed.append({"bandwidth": machine.bandwidth, "links": machine.links})
    cuts = [
        balance(
            profile,
            plan.num_stages,
            placement=plan.placement,
            num_ranks=plan.num_ranks,
            rank_times=machine.ranks,
            **wires,
        )
        for wires in weighed
    ]
    choices = [
        Choice(
            plan,
            boundaries,
            profile,
            machine=machine,
            optimizer_bytes=wishes.optimizer_bytes,
            microbatches=wishes.microbatches,
        )
        for boundaries in dict.fromkeys(cut.boundaries for cut in cuts)
    ]
    return min(choices, key=lambda choice: choice.timeline.makespan) if len(choices) > 1 else choices[0]
