"""What comes into question: every plan that the user's wishes allow, and the best cuts of the model for each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from penstock.balance import Profile, balance, leanest
from penstock.capture.by_modules import even_cuts
from penstock.errors import BalanceError, PlanError
from penstock.front.choice import FREE, Choice, Machine, Tried
from penstock.lower import divide
from penstock.plan import Placement, Plan
from penstock.schedules import Recipe, all_schedules, get_schedule

_MOST_STAGES_PER_RANK = 4
_PIECES = (2, 4)  # of a stage


@dataclass(frozen=True)
class Wishes:
    """What the user fixed, and what was measured of the machine."""

    num_ranks: int
    num_microbatches: int
    schedule: str | Plan | Recipe = "auto"
    num_stages: int | None = None
    placement: Placement | str | None = None
    memory_limit: int | Sequence[int] | None = None
    optimizer_bytes: float = 2.0  # for each byte of parameters
    machine: Machine = FREE
    offload: bool = False  # whether stages may be offloaded to keep to the limit
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
        return self.schedule != "auto"


def plans(wishes: Wishes, num_layers: int) -> Iterator[Plan]:
    """Every plan that the wishes allow for a model of so many layers."""
    given = wishes.schedule
    if isinstance(given, Plan):
        yield given
        return
    recipes = [recipe for recipe in all_schedules() if recipe.name != "forward"]
    if wishes.is_given:
        recipes = [given if isinstance(given, Recipe) else get_schedule(given)]
    for recipe in recipes:
        for stages in _stages_per_rank(recipe, wishes, num_layers):
            plan = recipe(wishes.num_ranks, wishes.num_microbatches, stages_per_rank=stages)
            if _placed(plan, wishes):
                yield plan


def _stages_per_rank(recipe: Recipe, wishes: Wishes, num_layers: int) -> Sequence[int]:
    if wishes.num_stages is not None:
        wanted, rest = divmod(wishes.num_stages, wishes.num_ranks)
        if rest:
            raise PlanError(
                f"{wishes.num_stages} stages over {wishes.num_ranks} ranks; expected a multiple of {wishes.num_ranks}, "
                "or a plan of your own: schedule=plan"
            )
        if wishes.is_given:
            recipe.sizes(wishes.num_ranks, wishes.num_microbatches, wanted)  # raises, and says what would do
        return (wanted,) if recipe.stages_per_rank in (None, wanted) else ()
    if recipe.stages_per_rank is not None:
        return (recipe.stages_per_rank,)
    if wishes.is_given:
        return (recipe.default_stages_per_rank,)
    return range(2, min(_MOST_STAGES_PER_RANK, num_layers // wishes.num_ranks) + 1)


def _placed(plan: Plan, wishes: Wishes) -> bool:
    if wishes.placement is None or isinstance(wishes.placement, Placement):
        return wishes.placement in (None, plan.placement)
    same_anyway = wishes.is_given and plan.num_stages == plan.num_ranks  # one stage a rank: loop and v are one
    return plan.placement.kind == wishes.placement or same_anyway


def candidates(profile: Profile, wishes: Wishes, tried: list[Tried]) -> Iterator[Choice]:
    """Every plan with the cut that is best in time and, under a limit, with the one that holds least.

    `tried` gets the plans for which there is no cut.
    """
    lean: dict[tuple[int, ...], tuple[int, ...]] = {}
    for plan in plans(wishes, len(profile.layers)):
        microbatches = wishes.microbatches
        uncut = Choice(plan, (), profile, (), wishes.machine, wishes.optimizer_bytes, microbatches=microbatches)
        try:
            if plan.num_stages > len(profile.layers):
                raise BalanceError(f"the model has only {len(profile.layers)} layers")
            quick = fastest_cut(uncut)
        except BalanceError as error:
            tried.append(Tried.of(uncut, str(error)))
            continue
        yield quick
        if wishes.memory_limit is not None:
            if plan.placement.ranks not in lean:
                lean[plan.placement.ranks] = leanest(profile, plan.placement, optimizer_bytes=wishes.optimizer_bytes)
            if lean[plan.placement.ranks] != quick.boundaries:
                yield replace(quick, boundaries=lean[plan.placement.ranks])


def fastest_cut(choice: Choice) -> Choice:
    """The choice with the best cut by what the ranks compute; or, where some links are narrower than others, with what crosses
    them weighed as well, if the step is shorter with that.
    """
    plan, machine = choice.plan, choice.machine
    cut = partial(balance, choice.profile, plan.num_stages, placement=plan.placement, rank_times=machine.ranks)
    cuts = [cut()]
    if any(link.bandwidth is not None for link in machine.links):
        cuts.append(cut(bandwidth=machine.bandwidth, links=machine.links))
    choices = [replace(choice, boundaries=boundaries) for boundaries in dict.fromkeys(one.boundaries for one in cuts)]
    return min(choices, key=lambda one: one.timeline.makespan) if len(choices) > 1 else choices[0]


def in_pieces(bare: Choice, wishes: Wishes) -> Iterator[Choice]:
    """The choice with each stage in pieces on its rank, if nobody has said how many stages there are to be.

    The pieces are cut so that the largest one of a stage saves as little as can be.
    """
    free = not isinstance(wishes.schedule, Plan) and wishes.num_stages is None and wishes.placement is None
    sizes = [layer.activation_to_input for layer in bare.profile.layers]
    for pieces in _PIECES if free and bare.num_stages == bare.plan.num_ranks else ():
        if all(stop - first >= pieces for first, stop in bare.bounds):
            firsts = [first + cut for first, stop in bare.bounds for cut in (0, *even_cuts(sizes[first:stop], pieces))]
            yield replace(bare, plan=divide(bare.plan, pieces), boundaries=tuple(firsts[1:]))
