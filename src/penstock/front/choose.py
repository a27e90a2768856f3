"""Which schedule, with how many stages, cut where: every candidate is balanced, simulated, and the fastest that fits is taken.

>>> from penstock.balance import LayerCost
>>> layers = tuple(LayerCost(f"layers.{i}", 1.0, 1.0, 1.0) for i in range(8))
>>> choice = choose(Profile(layers), Wishes(num_ranks=2, num_microbatches=8))
>>> choice.num_stages, choice.boundaries
(4, (2, 4, 6))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.balance import Profile
from penstock.errors import BalanceError, PlanError
from penstock.front.candidates import Wishes, candidates, in_pieces
from penstock.front.choice import Choice, Tried, is_timed
from penstock.front.stage_costs import FREE
from penstock.front.within import Fit, budgeted, fitted, limit_text, nothing_fits, trimmed
from penstock.misfits import takes
from penstock.search import search

# Candidates this near to the fastest count as equally fast: then fewer stages are taken, which send fewer messages, and
# of those what holds less.
_CLOSE = 1.03
_TRIMMED = 3  # candidates whose microbatches are weighed one by one


@takes(PlanError)
def choose(profile: Profile, wishes: Wishes) -> Choice:
    """Simulate every candidate with the costs of the profile, and take the fastest that fits.

        choose(profile, Wishes(num_ranks=4, num_microbatches=8)).plan

    If none keeps to a limit of memory, BalanceError says the smallest that would do.
    """
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
            some = [found, *(budgeted(found) if wishes.budgets else ())]
            fits += [one for one in some if one.fits]
            tried.append(min(some, key=lambda one: (not one.fits, one.makespan)).tried)
            if wishes.memory_limit is not None:
                lean = (least, start, found, start.leanest, *(one.leanest for one in pieces))
                least = min((fit for fit in lean if fit is not None), key=lambda fit: max(fit.choice.memory))
    if not fits:
        raise BalanceError(f"no schedule can be used:\n{_reasons(tried)}" if least is None else nothing_fits(least))
    fits.sort(key=lambda fit: fit.makespan)
    fits[:_TRIMMED] = [trimmed(fit, wishes) for fit in fits[:_TRIMMED]]
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
    bound = (
        f"at most {found.gap:.1%} from the best for these stages" if found.gap > 1e-9 else "the best for these stages"
    )
    if found.origin != "search" or ratio >= 1.0:
        return replace(known, why=f"{known.why}; a search found none that is faster")
    if is_limited and any(peak > left for peak, left in zip(choice.timeline.peak_memory, room, strict=True)):
        return replace(known, why=f"{known.why}; what a search found holds too much with its messages")
    tried = Tried.of(choice)
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
