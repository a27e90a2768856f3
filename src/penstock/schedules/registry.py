"""Schedules by name, and what all of them share.

A schedule is a function from sizes and a rank to that rank's packed compute actions. Nothing else is needed to build a
plan, so one rank of a thousand can build its own part alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from penstock.checks import check_types
from penstock.errors import PlanError, UnknownNameError
from penstock.plan import Placement, Plan, StageGraph
from penstock.plan.actions import MAX_MICROBATCH, MAX_STAGE
from penstock.plan.lazy_actions import Lists
from penstock.plan.plan import Family


@dataclass(frozen=True)
class Sizes:
    """Sizes of a schedule. Stages are counted over all ranks.

    Sizes(num_ranks=4, num_microbatches=8, stages_per_rank=2).num_stages  # 8
    """

    num_ranks: int
    num_microbatches: int
    stages_per_rank: int = 1

    def __post_init__(self) -> None:
        for what in ("num_ranks", "num_microbatches", "stages_per_rank"):
            value = getattr(self, what)
            if not isinstance(value, int) or value < 1:
                raise PlanError(f"{what}={value!r}; expected a whole number, at least 1")
        if self.num_stages > MAX_STAGE + 1 or self.num_microbatches > MAX_MICROBATCH + 1:
            raise PlanError(
                f"{self.num_stages:,} stages and {self.num_microbatches:,} microbatches; expected at most {MAX_STAGE + 1:,} and "
                f"{MAX_MICROBATCH + 1:,}"
            )

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.stages_per_rank


@dataclass(frozen=True)
class Recipe:
    """A schedule under its name: calling it makes a plan.

    >>> from penstock.schedules import get_schedule
    >>> print(*get_schedule("1f1b")(2, 3).lines(), sep="\\n")
    rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
    rank 1: 1F0 1B0 1F1 1B1 1F2 1B2
    """

    name: str  # how penstock prints it, e.g. "zb-h1"
    title: str  # one line for people
    rank_actions: Callable[[Sizes, int], list[int]]  # the packed compute actions of one rank, in order
    placement: Literal["loop", "v"] = "loop"
    stages_per_rank: int | None = None  # the only number that it allows, or None for any
    default_stages_per_rank: int = 1
    aliases: tuple[str, ...] = ()
    is_family: bool = False  # whether tests prove it right for all sizes, so that no run has to; see `Plan.is_share`

    def sizes(self, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None) -> Sizes:
        """Check the sizes and fill in the default."""
        usual = self.stages_per_rank or self.default_stages_per_rank
        wanted = usual if stages_per_rank is None else stages_per_rank
        if self.stages_per_rank is not None and wanted != self.stages_per_rank:
            others = ", ".join(r.name for r in _RECIPES.values() if r.stages_per_rank in (None, wanted))
            raise PlanError(
                f"{self.name} with {wanted} stages a rank; it is made for {self.stages_per_rank}. "
                f"Leave stages_per_rank out, or pick another schedule: {others}"
            )
        return Sizes(num_ranks, num_microbatches, wanted)

    def place(self, sizes: Sizes) -> Placement:
        make = Placement.loop if self.placement == "loop" else Placement.v
        return make(sizes.num_ranks, sizes.stages_per_rank)

    def __call__(
        self,
        num_ranks: int,
        num_microbatches: int,
        *,
        stages_per_rank: int | None = None,
        graph: StageGraph | None = None,
    ) -> Plan:
        """The plan of compute actions for these sizes. `graph` is a chain unless the model has skip connections."""
        sizes = self.sizes(num_ranks, num_microbatches, stages_per_rank)
        chain = StageGraph.chain(sizes.num_stages)
        graph = chain if graph is None else graph
        lists = Lists(num_ranks, partial(self.rank_actions, sizes))
        plan = Plan(self.place(sizes), graph, num_microbatches, lists, self.name)
        if not self.is_family:
            return plan.with_codes(lists)
        told = f"{num_ranks} ranks, {sizes.stages_per_rank} stages each, {num_microbatches} microbatches"
        return replace(plan, family=Family(f"{self.name}: {told}")) if graph == chain else plan


_RECIPES: dict[str, Recipe] = {}
_BY_SPELLING: dict[str, Recipe] = {}


def _fold(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum()).removeprefix("schedule")


def register(recipe: Recipe) -> Recipe:
    """Make a schedule known to `get_schedule`, the command line and the gallery. The same name again replaces it.

    register(Recipe("mine", "what it is", rank_actions, stages_per_rank=1))
    """
    check_types("register", PlanError, recipe=(recipe, Recipe))
    spellings = {_fold(spelling): spelling for spelling in (recipe.name, *recipe.aliases)}
    for folded, spelling in spellings.items():
        other = _BY_SPELLING.get(folded, recipe)
        if other.name != recipe.name:
            raise PlanError(f"the name {spelling!r} is taken by the schedule {other.name!r}; choose another")
    _BY_SPELLING.update(dict.fromkeys(spellings, recipe))
    _RECIPES[recipe.name] = recipe
    return recipe


def all_schedules() -> tuple[Recipe, ...]:
    """Every schedule that has a name, in the order in which they were registered.

    [recipe.name for recipe in all_schedules()]
    """
    return tuple(_RECIPES.values())


def get_schedule(name: str) -> Recipe:
    """Find a schedule by its usual names, in any spelling.

    >>> get_schedule("Schedule_Interleaved-1F1B").name
    'interleaved1f1b'
    """
    found = _BY_SPELLING.get(_fold(name)) if isinstance(name, str) else None
    if found is None:
        near = difflib.get_close_matches(_fold(str(name)), _BY_SPELLING, n=1, cutoff=0.4)
        hint = f" Did you mean {_BY_SPELLING[near[0]].name!r}?" if near else ""
        raise UnknownNameError(f"no schedule is called {name!r}.{hint} There are: {', '.join(_RECIPES)}")
    return found


def known_plans(
    placement: Placement, num_microbatches: int, *, graph: StageGraph, more: Iterable[Recipe] = ()
) -> Iterator[Plan]:
    """The training plans of all schedules that place their stages so, and of some `more` recipes."""
    per_rank, rest = divmod(placement.num_stages, placement.num_ranks)
    for recipe in (*all_schedules(), *more) if not rest else ():
        if recipe.stages_per_rank in (None, per_rank):
            plan = recipe(placement.num_ranks, num_microbatches, stages_per_rank=per_rank, graph=graph)
            if plan.placement == placement and plan.has_backward:
                yield plan
