"""A good cut where several stages on a rank are too many to weigh exactly: memory shared out beforehand."""

from __future__ import annotations

from penstock.balance import chain
from penstock.balance.problem import Problem
from penstock.errors import BalanceError

_MOST_ROUNDS = 32


def by_shares(problem: Problem) -> tuple[int, ...]:
    """A good cut, with the memory of each rank shared out among its stages beforehand."""
    found = []
    for share in _first_shares(problem):
        for _ in range(_MOST_ROUNDS):
            window = chain.windows(problem, share, range(problem.num_stages))
            bound = chain.slowest(problem, window)
            if bound is None:
                break
            cuts = chain.settle(problem, bound, window)
            if share is None or problem.fits(cuts):
                found.append((bound, cuts))
                break
            share = _less(problem, cuts, share)
    if not found:
        raise BalanceError(
            f"{problem.num_layers} layers in {problem.num_stages} stages on {problem.num_ranks} ranks are too many to "
            "weigh rank by rank under this memory_limit, and no simple cut fits it; "
            "profile whole blocks instead of single nodes, or raise memory_limit"
        )
    return min(found)[1]


def _first_shares(problem: Problem) -> list[list[int] | None]:
    """Bytes for each stage to begin with: all of its rank's, an equal part, a part by what the stage holds."""
    if problem.limits is None:
        return [None]
    whole = [problem.limits[rank] for rank in problem.ranks]
    shares: list[list[int] | None] = [whole]
    for weights in ([1] * problem.num_stages, [sizes[-1] for sizes in problem.memory_prefix]):
        sums = [sum(weights[s] for s in problem.rank_stages[rank]) or 1 for rank in problem.ranks]
        shares.append([limit * weight // total for limit, weight, total in zip(whole, weights, sums, strict=True)])
    return shares


def _less(problem: Problem, cuts: tuple[int, ...], share: list[int]) -> list[int]:
    """Of each rank that is over its limit, the fullest stage must give up something."""
    assert problem.limits is not None, "shares are of limits"
    share = list(share)
    for rank, limit in enumerate(problem.limits):
        if problem.rank_memory(rank, cuts) > limit:
            used = {s: problem.stage_memory(s, cuts[s], cuts[s + 1]) for s in problem.rank_stages[rank]}
            fullest = max(used, key=lambda s: used[s])
            share[fullest] = used[fullest] - 1
    return share
