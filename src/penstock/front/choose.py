"""Which schedule, with how many stages, cut where: every candidate is balanced, simulated, and the fastest that fits is taken.

>>> from penstock.balance import LayerCost
>>> layers = tuple(LayerCost(f"layers.{i}", 1.0, 1.0, 1.0) for i in range(8))
>>> choice = choose(Profile(layers), Wishes(num_ranks=2, num_microbatches=8))
>>> choice.num_stages, choice.boundaries
(4, (2, 4, 6))

Under a limit of memory a candidate is also which stages recompute or offload:

    choice = choose(profile, Wishes(2, 8, memory_limit=6 << 30))
    [(one.stage, one.way, one.size, one.time) for one in choice.spared]

Every candidate is simulated with all that a rank holds: parameters, gradients and optimizer state; what forwards saved and the
inputs they keep; buffers of messages; what operators need for a moment. Where that is more than the limit, the stages of the rank
hold less one after the other, those first whose activations live longest, until it fits; then as few microbatches as will do.
A candidate with one stage a rank that is too large is tried with its stages in pieces too: of a stage that is recomputed piece by
piece, one piece at a time is held.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from penstock.balance import Profile
from penstock.balance.cuts import aligned, size_text
from penstock.checks import check_types
from penstock.errors import BalanceError, PlanError
from penstock.front.candidates import Wishes, candidates, in_pieces
from penstock.front.choice import FREE, Choice, Spared, Tried, is_timed
from penstock.front.choice_text import rank_rows
from penstock.lower import offload, recompute
from penstock.plan import Plan
from penstock.plan.actions import OP, microbatch_of, stage_of
from penstock.plan.ops import CHOICES
from penstock.search import search

# Candidates this near to the fastest count as equally fast: then fewer stages are taken, which send fewer messages, and
# of those what holds less.
_CLOSE = 1.03
_TRIMMED = 3  # candidates whose microbatches are weighed one by one
RECOMPUTE, OFFLOAD = "recompute", "offload"
Ways = Mapping[int, tuple[str, int]]
"""By stage: how it holds less, and for how many of its microbatches."""


def choose(profile: Profile, wishes: Wishes) -> Choice:
    """Simulate every candidate with the costs of the profile, and take the fastest that fits.

        choose(profile, Wishes(num_ranks=4, num_microbatches=8)).plan

    If none keeps to a limit of memory, BalanceError says the smallest that would do.
    """
    check_types("choose", PlanError, profile=(profile, Profile), wishes=(wishes, Wishes))
    if not is_timed(profile):
        wishes = replace(wishes, machine=replace(FREE, ranks=wishes.machine.ranks))
    if wishes.schedule == "search":
        known = choose(profile, replace(wishes, schedule="auto"))
        return known if known.spared else _searched(known, wishes)
    fits: list[Fit] = []
    tried: list[Tried] = []
    least: Fit | None = None  # under a limit: of all candidates the one that can hold least
    for bare in candidates(profile, wishes, tried):
        whole = Fit(bare, wishes.limits)
        pieces = [Fit(one, wishes.limits) for one in in_pieces(bare, wishes)] if wishes.memory_limit is not None else []
        for start in [whole] if whole.fits else [whole, *pieces]:
            found = fitted(start, wishes)
            fits += [found] if found.fits else []
            tried.append(found.tried)
            if wishes.memory_limit is not None:
                lean = (least, start, found, start.leanest, *(one.leanest for one in pieces))
                least = min((fit for fit in lean if fit is not None), key=lambda fit: max(fit.choice.memory))
    if not fits:
        raise BalanceError(f"no schedule can be used:\n{_reasons(tried)}" if least is None else nothing_fits(least))
    fits.sort(key=lambda fit: fit.makespan)
    fits[:_TRIMMED] = map(trimmed, fits[:_TRIMMED])
    fastest = min(fit.makespan for fit in fits)
    near = [fit for fit in fits if fit.makespan <= _CLOSE * fastest]
    best = min(near, key=lambda fit: (fit.choice.num_stages, max(fit.choice.memory)))
    why = "given" if wishes.is_given else _why_chosen(best, len(fits), fastest, profile)
    measured = not profile.metadata.get("estimated")
    if least is not None:
        why += f", within {limit_text(wishes.limits)} a rank"
        why += "" if measured else " by its parameters: no step was measured"
    return replace(
        best.choice,
        tried=tuple(sorted(tried, key=lambda one: (one.makespan is None, one.makespan or 0.0))),
        why=why,
        spared=best.spared,
        smallest_limit=None if least is None or not measured else max(least.choice.memory),
    )


def _searched(known: Choice, wishes: Wishes) -> Choice:
    """For the stages of the best known schedule, one made to measure, if that is faster.

    It may hold what the limit leaves beside parameters and optimizer; without a limit, what the known one holds.
    """
    placement, is_limited = known.plan.placement, wishes.memory_limit is not None
    room: list[float] = list(known.timeline.peak_memory)
    if is_limited:
        room = [limit - known.state_bytes(placement.stages_of(rank)) for rank, limit in enumerate(wishes.limits)]
    try:
        found = search(wishes.num_ranks, wishes.num_microbatches, known.costs, memory_limit=room, placement=placement)
    except PlanError:  # one microbatch does not fit
        return replace(known, why=f"{known.why}; a search found none that fits")
    choice = replace(known, plan=replace(found.plan, name="searched"))
    ratio = choice.timeline.makespan / known.timeline.makespan
    bound = f"at most {found.gap:.1%} from the best" if found.gap > 1e-9 else "the best"
    if found.origin != "search" or ratio >= 1.0:
        return replace(known, why=f"{known.why}; a search found none that is faster")
    if is_limited and any(peak > left for peak, left in zip(choice.timeline.peak_memory, room, strict=True)):
        return replace(known, why=f"{known.why}; what a search found holds too much with its messages")
    faster = f"{1 - ratio:.1%} faster than {known.plan.name}"
    why = f"searched: {faster}, {bound} for these stages {_at_costs(known.profile)}"
    return replace(choice, tried=(Tried.of(choice), *known.tried), why=why)


def _reasons(refused: Sequence[Tried]) -> str:
    """Each reason once, with the candidates that it holds for."""
    lines: dict[str, list[str]] = {}
    for tried in refused:
        lines.setdefault(tried.why, []).append(f"{tried.schedule} ({tried.stages_per_rank} a rank)")
    if not lines:
        return "  none allows these stages and this placement"
    return "\n".join(f"  {', '.join(names)}:\n    {why}" for why, names in lines.items())


def _why_chosen(best: Fit, count: int, fastest: float, profile: Profile) -> str:
    if best.makespan > fastest:
        close = f"within {100 * (_CLOSE - 1):.0f}% of the fastest of {count} candidates {_at_costs(profile)}"
        return f"{close}, with the fewest stages and the least memory of those"
    return f"the fastest of {count} candidates {_at_costs(profile)}"


def _at_costs(profile: Profile) -> str:
    if is_timed(profile):
        return "at the measured costs"
    if profile.metadata.get("estimated"):
        return f"at costs estimated by {profile.metadata['estimated']}"
    return "at the costs of the given profile"


@dataclass(frozen=True)
class Fit:
    """A candidate with the stages that hold less."""

    bare: Choice  # as it would be without
    limits: tuple[float, ...]  # bytes of each rank
    ways: Ways = field(default_factory=dict)

    @cached_property
    def choice(self) -> Choice:
        if not self.ways:
            return self.bare
        return replace(self.bare, plan=holding_less(self.bare.plan, self.ways))

    @property
    def fits(self) -> bool:
        return not self.over

    @property
    def over(self) -> list[int]:
        """The ranks that hold too much."""
        return [rank for rank, size in enumerate(self.choice.memory) if size > self.limits[rank]]

    @property
    def makespan(self) -> float:
        return self.choice.timeline.makespan

    @property
    def tried(self) -> Tried:
        if self.fits:
            return Tried.of(self.choice)
        needs = ", ".join(f"rank {rank} {size_text(self.choice.memory[rank])}" for rank in self.over)
        return Tried.of(self.choice, f"needs more than the limit: {needs}")

    @property
    def spared(self) -> tuple[Spared, ...]:
        """What each stage that holds less saves its rank, and what it costs: the difference to the same without it."""
        found = []
        for stage, (way, number) in self.ways.items():
            without = replace(self, ways={s: w for s, w in self.ways.items() if s != stage})
            rank = self.choice.plan.placement.rank_of(stage)
            saved = without.choice.memory[rank] - self.choice.memory[rank]
            time = max(self.makespan - without.makespan, 0.0)
            found.append(Spared(stage, way, number, max(saved, 0), time))
        return tuple(found)

    @property
    def leanest(self) -> Fit:
        """The same candidate with every stage recomputed."""
        every = self.bare.plan.num_microbatches
        return replace(self, ways=dict.fromkeys(range(self.bare.num_stages), (RECOMPUTE, every)))


def holding_less(plan: Plan, ways: Ways) -> Plan:
    """The plan in which some stages recompute or offload, for so many of their microbatches, evenly spread.

    What the plan recomputes or offloads already stays as it is.
    """
    count = plan.num_microbatches
    done = {(stage_of(code), microbatch_of(code)) for codes in plan.codes for code in codes if code & OP in CHOICES}

    def spread(stage: int, number: int) -> list[int]:
        evenly = (m for m in range(count) if m * number // count != (m + 1) * number // count)
        return [m for m in evenly if (stage, m) not in done]

    for way, change in ((OFFLOAD, offload), (RECOMPUTE, recompute)):
        chosen = {stage: spread(stage, number) for stage, (how, number) in ways.items() if how == way}
        plan = change(plan, chosen) if any(chosen.values()) else plan
    return plan


def fitted(start: Fit, wishes: Wishes) -> Fit:
    """Let one stage after the other of each rank that is too full hold less."""
    every, placement = start.bare.plan.num_microbatches, start.bare.plan.placement
    ways = (RECOMPUTE, OFFLOAD) if wishes.offload else (RECOMPUTE,)
    best = start
    while not best.fits:
        left = {r: [s for s in placement.stages_of(r) if s not in best.ways] for r in best.over}
        if not any(left.values()):
            break
        firsts = [stages[0] for stages in left.values() if stages]
        options = [replace(best, ways={**best.ways, **dict.fromkeys(firsts, (way, every))}) for way in ways]
        best = min(options, key=lambda fit: (len(fit.over), fit.makespan))
    if wishes.offload and not best.fits:  # what is quicker at first may leave too much in the end
        return fitted(start, replace(wishes, offload=False))
    return best


def trimmed(fit: Fit) -> Fit:
    """Let each stage hold less for as few of its microbatches as will do."""
    for stage in fit.ways:
        fit = min(_with_fewest(fit, stage), fit, key=lambda one: one.makespan)
    return fit


def _with_fewest(fit: Fit, stage: int) -> Fit:
    way, number = fit.ways[stage]
    rest = {other: how for other, how in fit.ways.items() if other != stage}

    def with_number(few: int) -> Fit:
        return replace(fit, ways={**rest, stage: (way, few)} if few else rest)

    return with_number(bisect_left(range(number), True, key=lambda few: with_number(few).fits))


def limit_text(limits: Sequence[float]) -> str:
    """The limits of the ranks, each once."""
    return " or ".join(size_text(round(limit)) for limit in dict.fromkeys(limits))


def nothing_fits(least: Fit) -> str:
    """What to say when even the candidate that holds least does not keep to its limits."""
    choice, most = least.choice, max(least.choice.memory)
    how = "with everything recomputed" if choice.plan.name and least.ways else "as it is"
    return (
        f"memory_limit: nothing fits into {limit_text(least.limits)} a rank. The smallest limit that would do is "
        f"{most} bytes ({size_text(most)}), for {choice.plan.name}, "
        f"{choice.num_stages} stages, {how}:\n" + "\n".join(aligned(rank_rows(choice))) + "\n"
        "Raise memory_limit, use more ranks or more microbatches, or an optimizer with less state (optimizer_bytes=)"
    )
