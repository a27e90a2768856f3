"""Which schedule, with how many stages, cut where: every candidate is balanced, simulated, and the fastest is taken.

>>> from penstock.balance import LayerCost
>>> layers = tuple(LayerCost(f"layers.{i}", 1.0, 1.0, 1.0) for i in range(8))
>>> choice = choose(Profile(layers), Wishes(num_ranks=2, num_microbatches=8))
>>> choice.num_stages, choice.boundaries
(4, (2, 4, 6))
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from penstock.balance import Profile, balance
from penstock.comm.decoding import reading
from penstock.errors import BalanceError, PlanError
from penstock.front.stage_costs import FREE, Machine, stage_costs
from penstock.lower import lower
from penstock.plan import Placement, Plan, dumps, loads
from penstock.schedules import Recipe, all_schedules, get_schedule
from penstock.search import search
from penstock.simulate import Costs, Link, Timeline, dumps_costs, loads_costs, simulate

# Candidates this near to the fastest count as equally fast: then fewer stages are taken, which send fewer messages, and
# of those what holds less.
CLOSE = 1.03
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
    microbatches: tuple[float, ...] | None = None  # how large each is beside the others; None: they are alike


@dataclass(frozen=True)
class Spared:
    """One stage that holds less, to keep to a limit.

    [(one.stage, one.way, one.size, one.time) for one in pipe.choice.spared]
    """

    stage: int
    way: str  # "recompute" or "offload"
    microbatches: int  # of how many
    size: int  # bytes less on its rank
    time: float  # what the step takes longer for it, in the unit of the profile


@dataclass(frozen=True)
class Tried:
    """One candidate.

    [(one.schedule, one.makespan) for one in pipe.choice.tried]
    """

    schedule: str
    stages_per_rank: int
    makespan: float | None  # in the unit of the profile; None: impossible, and `why` says why
    bubble: float = 0.0
    memory: int = 0  # bytes of the fullest rank
    why: str = ""


@dataclass(frozen=True)
class Choice:
    """What was chosen, and among what.

    pipe.choice.plan.name, pipe.choice.timeline.makespan
    """

    plan: Plan  # compute actions
    boundaries: tuple[int, ...]  # the first layer of each stage but the first
    profile: Profile
    tried: tuple[Tried, ...] = ()
    machine: Machine = FREE
    optimizer_bytes: float = 2.0
    why: str = ""
    calibrated: Costs | None = None  # of the stages, measured in steps of all ranks; see `Pipeline.calibrate`
    spared: tuple[Spared, ...] = ()  # the stages that hold less, to keep to a limit
    smallest_limit: int | None = None  # bytes a rank: the least limit that would have done
    microbatches: tuple[float, ...] | None = None  # how large each is beside the others

    @property
    def num_stages(self) -> int:
        return self.plan.num_stages

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """The layers of each stage: first, and one after the last."""
        edges = [0, *self.boundaries, len(self.profile.layers)]
        return tuple(pairwise(edges))

    @property
    def is_timed(self) -> bool:
        """Whether the costs are seconds, or only say how large one stage is beside another."""
        return is_timed(self.profile)

    @cached_property
    def costs(self) -> Costs:
        if self.calibrated is not None:
            return self.calibrated
        found = stage_costs(self.profile, self.bounds, self.machine, self.plan.placement)
        return replace(found, microbatches=self.microbatches)

    @property
    def predicted(self) -> float:
        """How long a step takes, by these costs: its actions, what they take longer now and then, and what is around them."""
        return self.timeline.makespan + self.costs.uneven + self.machine.around

    @cached_property
    def timeline(self) -> Timeline:
        """The lowered plan in time, by these costs."""
        return replace(simulate(lower(self.plan), self.costs), unit="s" if self.is_timed else "")

    def parameter_bytes(self, stages: Sequence[int]) -> int:
        """Of some stages together; what they share counts once."""
        layers = [layer for s in stages for layer in self.profile.layers[slice(*self.bounds[s])]]
        shared = frozenset[str]().union(*(layer.shared for layer in layers))
        return sum(layer.parameter_bytes for layer in layers) + sum(self.profile.shared_parameters[n] for n in shared)

    def state_bytes(self, stages: Sequence[int]) -> int:
        """Parameters, gradients and optimizer state."""
        return round(self.parameter_bytes(stages) * (2 + self.optimizer_bytes))

    def dumps(self) -> str:
        """As text; `Choice.loads` is the inverse."""
        return json.dumps(
            {
                "plan": dumps(self.plan),
                "schedule": self.plan.name,
                "placement": list(self.plan.placement.ranks),
                "boundaries": list(self.boundaries),
                "profile": self.profile.dumps(),
                "tried": [asdict(tried) for tried in self.tried],
                "machine": asdict(self.machine),
                "optimizer_bytes": self.optimizer_bytes,
                "why": self.why,
                "calibrated": None if self.calibrated is None else dumps_costs(self.calibrated),
                "spared": [asdict(spared) for spared in self.spared],
                "smallest_limit": self.smallest_limit,
                "microbatches": self.microbatches,
            }
        )

    @classmethod
    def loads(cls, text: str) -> Choice:
        """Read what `dumps` wrote."""
        with reading("the choice of a schedule"):
            return cls._of(json.loads(text))

    @classmethod
    def _of(cls, data: dict[str, Any]) -> Choice:
        machine = data["machine"]
        links = tuple(Link(*link) for link in machine.pop("links", ()))
        ranks = machine.pop("ranks", None)
        calibrated, sizes = data.get("calibrated"), data.get("microbatches")
        return cls(
            plan=replace(loads(data["plan"]), name=data["schedule"], placement=Placement.of(data["placement"])),
            boundaries=tuple(data["boundaries"]),
            profile=Profile.loads(data["profile"]),
            tried=tuple(Tried(**tried) for tried in data["tried"]),
            machine=Machine(**machine, links=links, ranks=ranks and tuple(ranks)),
            optimizer_bytes=data["optimizer_bytes"],
            why=data["why"],
            calibrated=None if calibrated is None else loads_costs(calibrated),
            spared=tuple(Spared(**spared) for spared in data.get("spared", ())),
            smallest_limit=data.get("smallest_limit"),
            microbatches=sizes and tuple(sizes),
        )


@dataclass
class _Found:
    tried: list[Tried] = field(default_factory=list)
    choices: list[tuple[Tried, Choice]] = field(default_factory=list)


def choose(profile: Profile, wishes: Wishes) -> Choice:
    """Simulate every candidate with the costs of the profile, and take the fastest that fits.

    choose(profile, Wishes(num_ranks=4, num_microbatches=8)).plan
    """
    if not is_timed(profile):
        wishes = replace(wishes, machine=replace(FREE, ranks=wishes.machine.ranks))
    if wishes.schedule == "search" and wishes.plan is None:
        known = choose(profile, replace(wishes, schedule="auto"))
        return known if known.spared else _searched(known, wishes)
    if wishes.memory_limit is not None:
        from penstock.front.within import choose_within

        return choose_within(profile, wishes)
    found = _Found()
    for plan in plans(profile, wishes):
        _try(plan, profile, wishes, found)
    if not found.choices:
        raise BalanceError(f"no schedule can be used:\n{_reasons(found.tried)}")
    fastest = min(tried.makespan or 0.0 for tried, _ in found.choices)
    near = [entry for entry in found.choices if (entry[0].makespan or 0.0) <= CLOSE * fastest]
    best, choice = min(near, key=lambda entry: (entry[1].num_stages, entry[0].memory))
    given = wishes.schedule != "auto" or wishes.plan is not None
    return replace(
        choice,
        tried=tuple(sorted(found.tried, key=lambda tried: (tried.makespan is None, tried.makespan or 0.0))),
        why=why_chosen(best, len(found.choices), fastest, given=given, profile=profile),
    )


def _searched(known: Choice, wishes: Wishes) -> Choice:
    """For the stages of the best known schedule, one made to measure, if that is faster.

    It may hold what the limit leaves beside parameters and optimizer; without a limit, what the known one holds.
    """
    placement, limit = known.plan.placement, wishes.memory_limit
    ranks = range(wishes.num_ranks)
    if limit is None:
        room: list[float] = list(known.timeline.peak_memory)
    else:
        limits = list(limit) if isinstance(limit, Sequence) else [limit for _ in ranks]
        room = [limits[rank] - known.state_bytes(placement.stages_of(rank)) for rank in ranks]
    try:
        found = search(wishes.num_ranks, wishes.num_microbatches, known.costs, memory_limit=room, placement=placement)
    except PlanError:  # backwards in one piece may hold less than any that is split
        return replace(known, why=f"{known.why}; a search found none that fits")
    choice = replace(known, plan=replace(found.plan, name="searched"))
    ratio = choice.timeline.makespan / known.timeline.makespan
    bound = (
        f"at most {found.gap:.1%} from the best for these stages" if found.gap > 1e-9 else "the best for these stages"
    )
    if found.origin != "search" or ratio >= 1.0:
        return replace(known, why=f"{known.why}; a search found none that is faster")
    memory = max(
        round(peak) + choice.state_bytes(placement.stages_of(rank))
        for rank, peak in enumerate(choice.timeline.peak_memory)
    )
    if limit is not None and any(peak > left for peak, left in zip(choice.timeline.peak_memory, room, strict=True)):
        return replace(known, why=f"{known.why}; what a search found holds too much with its messages")
    timeline = choice.timeline
    tried = Tried("searched", -(-choice.num_stages // len(ranks)), timeline.makespan, timeline.bubble_makespan, memory)
    why = f"searched: {1 - ratio:.1%} faster than {known.plan.name}, {bound} {_at_costs(known.profile)}"
    return replace(choice, tried=(tried, *known.tried), why=why)


def _reasons(refused: Sequence[Tried]) -> str:
    """Each reason once, with the candidates that it holds for."""
    lines: dict[str, list[str]] = {}
    for tried in refused:
        lines.setdefault(tried.why, []).append(f"{tried.schedule} ({tried.stages_per_rank} a rank)")
    if not lines:
        return "  none allows these stages and this placement"
    return "\n".join(f"  {', '.join(names)}:\n    {why}" for why, names in lines.items())


def why_chosen(best: Tried, count: int, fastest: float, *, given: bool, profile: Profile) -> str:
    if given:
        return "given"
    if best.makespan is not None and best.makespan > fastest:
        close = f"within {100 * (CLOSE - 1):.0f}% of the fastest of {count} candidates {_at_costs(profile)}"
        return f"{close}, with the fewest stages and the least memory of those"
    return f"the fastest of {count} candidates {_at_costs(profile)}"


def _at_costs(profile: Profile) -> str:
    if is_timed(profile):
        return "at the measured costs"
    if profile.metadata.get("estimated"):
        return f"at costs estimated by {profile.metadata['estimated']}"
    return "at the costs of the given profile"


def is_timed(profile: Profile) -> bool:
    """Whether its times are seconds: only those can be added to what was measured of the machine."""
    return profile.metadata.get("unit") == "s"


def plans(profile: Profile, wishes: Wishes) -> Iterator[Plan]:
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


def _try(plan: Plan, profile: Profile, wishes: Wishes, found: _Found) -> None:
    per_rank = -(-plan.num_stages // plan.num_ranks)
    if plan.num_stages > len(profile.layers):
        found.tried.append(Tried(plan.name, per_rank, None, why=f"the model has only {len(profile.layers)} layers"))
        return
    try:
        choice = fastest_cut(plan, profile, wishes)
    except BalanceError as error:
        found.tried.append(Tried(plan.name, per_rank, None, why=str(error)))
        return
    timeline = choice.timeline
    memory = max(
        round(peak) + choice.state_bytes(plan.placement.stages_of(rank))
        for rank, peak in enumerate(timeline.peak_memory)
    )
    tried = Tried(plan.name, per_rank, timeline.makespan, timeline.bubble_makespan, memory)
    found.tried.append(tried)
    found.choices.append((tried, choice))


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
