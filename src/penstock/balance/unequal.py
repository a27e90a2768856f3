"""The exact answer where ranks are not equally fast: a stage costs what its layers cost, times what its rank makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from penstock.balance.problem import Problem


def cut_for(problem: Problem, rank_times: Sequence[float], window: list[list[int]]) -> tuple[int, ...] | None:
    """The cut whose slowest stage, on its rank, is the fastest; of those with one, the smallest sum of squares.

    `window` says for each stage and cut where the stage may begin at the earliest, as memory allows. None: there is no cut.
    """
    count, stages = problem.num_layers, problem.num_stages
    best: list[tuple[float, float]] = [
        (0.0, 0.0),
        *[(inf, inf)] * count,
    ]  # by cut: slowest stage before it, and the squares
    chosen: list[list[int]] = []
    for stage in range(stages):
        factor, ends, starts = rank_times[problem.ranks[stage]], problem.ends(stage), problem.starts(stage)
        found, places = [(inf, inf)] * (count + 1), [0] * (count + 1)
        for stop in range(stage + 1, count - (stages - 1 - stage) + 1):
            for start in range(max(stage, window[stage][stop]), stop):
                slowest, squares = best[start]
                cost = factor * (ends[stop] - starts[start])
                value = max(slowest, cost), squares + cost * cost
                if value < found[stop]:
                    found[stop], places[stop] = value, start
        best = found
        chosen.append(places)
    if best[count][0] == inf:
        return None
    cuts = [count]
    for places in reversed(chosen):
        cuts.append(places[cuts[-1]])
    return tuple(reversed(cuts))
