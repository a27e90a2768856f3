"""Cuts for placements with several stages on a rank: the chain's answer, improved by local search.

What the stages of a rank hold or take together is no property of a single stage, so the chain solver does not see it. Its
answer, with each rank's memory shared out among its stages in several ways, is where the search begins. A move takes one cut,
or two, or all from one to another, by some layers; moves are made as long as one makes the value smaller. Where there are few
cuts, all are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations, pairwise
from math import comb
from typing import Literal

from penstock.balance import solve_chain
from penstock.balance.integer_problem import Problem

Objective = Literal["stage", "rank"]
Value = tuple[
    int, int, int
]  # bytes over the limits, cost of the slowest stage or rank, and what decides between equals
Valuation = Callable[[tuple[int, ...]], Value]
_ALL = 5_000  # cuts that are all tried
_PAIRS = 256  # at most so many pairs of cuts are moved together


def repaired(problem: Problem, objective: Objective) -> tuple[tuple[int, ...], int, bool]:
    """The best cuts that were found, the bytes by which they are over the limits, and True if all cuts were tried."""
    value = _valuation(problem, objective)
    inner = range(1, problem.num_layers)
    if comb(len(inner), problem.num_stages - 1) <= _ALL:
        every = ((0, *cuts, problem.num_layers) for cuts in combinations(inner, problem.num_stages - 1))
        best = min(every, key=value)
        return best, value(best)[0], True
    best = min((_improved(cuts, value, problem.num_layers) for cuts in _beginnings(problem)), key=value)
    return best, value(best)[0], False


def _beginnings(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Cuts of the chain: with no limits, with each stage under the whole limit of its rank, an equal part, and a part by size."""
    whole = [max(problem.limits[rank], 1) for rank in problem.ranks] if problem.limits is not None else None
    shares: list[list[int] | None] = [None]
    if whole is not None:
        shares.append(whole)
        for weights in ([1] * problem.num_stages, [sizes[-1] for sizes in problem.memory_prefix]):
            sums = [sum(weights[stage] for stage in problem.rank_stages[rank]) or 1 for rank in problem.ranks]
            shares.append([limit * weight // total for limit, weight, total in zip(whole, weights, sums, strict=True)])
    for share in shares:
        window = solve_chain.windows(problem, share, range(problem.num_stages))
        bound = solve_chain.slowest(problem, window)
        if bound is not None:
            yield solve_chain.settle(problem, bound, window)


def _valuation(problem: Problem, objective: Objective) -> Valuation:
    """A function of cuts; smaller is better."""
    groups = cache(problem.groups)
    ties = [problem.tie_cut(stage + 1) for stage in range(problem.num_stages)]

    def rank_memory(rank: int, cuts: tuple[int, ...]) -> int:
        spans = [(problem.memory_prefix[s], cuts[s], cuts[s + 1]) for s in problem.rank_stages[rank]]
        memory = sum(prefix[stop] - prefix[start] for prefix, start, stop in spans)
        if problem.group_states:
            memory += problem.group_memory(frozenset[str]().union(*(groups(start, stop) for _, start, stop in spans)))
        return memory

    def value(cuts: tuple[int, ...]) -> Value:
        excess = sum(max(0, rank_memory(rank, cuts) - limit) for rank, limit in enumerate(problem.limits or ()))
        costs = [weight * problem.cost(s, cuts[s], cuts[s + 1]) for s, weight in enumerate(problem.weights)]
        weighed = costs if objective == "stage" else [sum(costs[s] for s in own) for own in problem.rank_stages]
        tie = sum(tie[stop] for tie, stop in zip(ties, cuts[1:], strict=True))
        return excess, max(weighed), tie + sum(cost * cost for cost in costs)

    return value


def _improved(cuts: tuple[int, ...], value: Valuation, num_layers: int) -> tuple[int, ...]:
    """Make every move that helps until none does; first far, then near."""
    best = value(cuts)
    step = 1 << (num_layers // len(cuts)).bit_length()
    while step:
        before = best
        for move in _moves(len(cuts)):
            moved = _moved(cuts, step, *move)
            if all(low < high for low, high in pairwise(moved)) and (found := value(moved)) < best:
                cuts, best = moved, found
        if best == before:
            step //= 2
    return cuts


def _moves(count: int) -> Iterator[tuple[int, int, int, int]]:
    """Pairs of cuts (or one of them twice) with their directions, and that of the cuts between them."""
    inner = range(1, count - 1)
    near = max(2, _PAIRS // max(1, len(inner)))
    for first in inner:
        for second in inner[first - 1 :]:
            if second - first <= near or first + second == count - 1:
                for by in (-1, 1):
                    yield first, second, by, by
                    yield first, second, by, 0
                    yield first, second, by, -by


def _moved(cuts: tuple[int, ...], step: int, first: int, second: int, by: int, last: int) -> tuple[int, ...]:
    """The cuts from the first to the second moved by the same, if `last` is 0; else only these two, each its own way.

    >>> _moved((0, 4, 6, 8, 12), 1, 1, 3, 1, 0), _moved((0, 4, 6, 8, 12), 1, 1, 3, -1, 1)
    ((0, 5, 7, 9, 12), (0, 3, 6, 9, 12))
    """
    moved = list(cuts)
    if last == 0:
        moved[first : second + 1] = [cut + by * step for cut in moved[first : second + 1]]
        return tuple(moved)
    moved[first] += by * step
    if second > first:
        moved[second] += last * step
    return tuple(moved)
