"""The exact answer where every stage stands for itself: a chain of cuts, no rank-wide sums.

`sweep` answers "is there a cut in which no stage costs more than `bound`?", stage by stage (a cost is a time, weighed by
how slow the rank of the stage is): for each cut the best cut
before it is the one with the largest start value in its window (a monotone queue). `slowest` searches the least such
bound among real sums, `settle` then picks, under it, the least bytes between ranks and the smallest sum of squares.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from penstock.balance.integer_problem import Problem

Layers = list[dict[int, int]]  # for each boundary: reachable cut -> the cut before it


def windows(problem: Problem, limits: Sequence[int] | None, of: Sequence[int] | None = None) -> list[list[int]]:
    """For each stage and cut b: the first a for which the layers a..b alone fit its limit, that of its rank unless `of` says."""
    if limits is None:
        return [[0] * (problem.num_layers + 1)] * problem.num_stages
    keys = [(limits[rank], held) for rank, held in zip(of or problem.ranks, problem.in_flight, strict=True)]
    known = {key: _window(problem, *key) for key in set(keys)}
    return [known[key] for key in keys]


def _window(problem: Problem, limit: int, in_flight: tuple[int, int]) -> list[int]:
    sizes, layers, groups = problem.layer_memory(in_flight), problem.profile.layers, problem.group_states
    used = dict.fromkeys(groups, 0)
    first, start, memory = [0], 0, 0
    for stop, layer in enumerate(layers, 1):
        memory += sizes[stop - 1]
        for name in layer.shared:
            memory += 0 if used[name] else groups[name]
            used[name] += 1
        while memory > limit and start < stop:
            memory -= sizes[start]
            for name in layers[start].shared:
                used[name] -= 1
                memory -= 0 if used[name] else groups[name]
            start += 1
        first.append(start)
    return first


def sweep(problem: Problem, bound: int | None, window: list[list[int]]) -> Layers | None:
    """Every cut that can stand at each boundary with no stage over the bound; None when the end is out of reach."""
    count, stages, prefix = problem.num_layers, problem.num_stages, problem.prefix
    bounds = [(problem.ceiling if bound is None else bound) // weight for weight in problem.weights]
    layers: Layers = [{0: 0}]
    for stage in range(stages):
        left = stages - 1 - stage
        low = max(stage + 1, bisect_left(prefix, prefix[-1] - sum(bounds[stage + 1 :]))) if left else count
        high = min(count - left, bisect_right(prefix, sum(bounds[: stage + 1])) - 1)
        ends, starts, first = problem.ends(stage), problem.starts(stage), window[stage]
        before, taken = list(layers[-1]), 0
        queue: deque[int] = deque()
        reached: dict[int, int] = {}
        for stop in range(low, high + 1):
            while taken < len(before) and before[taken] < stop:
                start = before[taken]
                while queue and starts[queue[-1]] <= starts[start]:
                    queue.pop()
                queue.append(start)
                taken += 1
            while queue and queue[0] < first[stop]:
                queue.popleft()
            if queue and ends[stop] - starts[queue[0]] <= bounds[stage]:
                reached[stop] = queue[0]
        if not reached:
            return None
        layers.append(reached)
    return layers


def path(layers: Layers, end: int) -> tuple[int, ...]:
    """Walk back from the last cut."""
    cuts = [end]
    for reached in reversed(layers[1:]):
        cuts.append(reached[cuts[-1]])
    return tuple(reversed(cuts))


def slowest(problem: Problem, window: list[list[int]]) -> int | None:
    """The least possible cost of the slowest stage; None when memory allows no cut at all."""

    def attempt(bound: int) -> int | None:
        layers = sweep(problem, bound, window)
        if layers is None:
            return None
        cuts = path(layers, problem.num_layers)
        return max(weight * problem.cost(s, cuts[s], cuts[s + 1]) for s, weight in enumerate(problem.weights))

    even = -(-problem.prefix[-1] // sum(Fraction(1, weight) for weight in problem.weights))
    longest = max(stop - start for start, stop in pairwise(problem.prefix))  # the time of the slowest layer
    low = max(even, longest * min(problem.weights))
    bound, gap = low, max(1, low >> 12)
    while (high := attempt(bound)) is None:
        if bound == problem.ceiling:
            return None
        low, bound, gap = bound + 1, min(problem.ceiling, bound + gap), gap * 8
    tries = 0
    while low < high:
        tries += 1
        # A cut that is found lowers `high` to a real sum; asking just below it now and then proves it the least.
        middle = high - 1 if tries % 3 == 0 else (low + high) // 2
        found = attempt(middle)
        if found is None:
            low = middle + 1
        else:
            high = found
    return high


def settle(problem: Problem, bound: int, window: list[list[int]]) -> tuple[int, ...]:
    """Of all cuts within the bound: the least bytes between ranks, then the smallest sum of squared costs."""
    layers = sweep(problem, bound, window)
    assert layers is not None, "settle is asked only for a bound that slowest has found"
    prefix = problem.prefix
    values = {0: 0}
    chosen: Layers = [{0: 0}]
    for stage, weight in enumerate(problem.weights):
        rows, columns, first = list(layers[stage + 1]), list(values), window[stage]
        lows = [max(first[stop], bisect_left(prefix, prefix[stop] - bound // weight)) for stop in rows]
        spans = [(bisect_left(columns, low), bisect_left(columns, stop)) for low, stop in zip(lows, rows, strict=True)]
        ends, starts = problem.ends(stage), problem.starts(stage)
        tops, marks = [weight * ends[r] for r in rows], [weight * starts[c] for c in columns]
        best = _pick(spans, tops, marks, values=list(values.values()), bound=bound)
        tie = problem.tie_cut(stage + 1)
        chosen.append({stop: columns[column] for stop, (_, column) in zip(rows, best, strict=True)})
        values = {stop: value + tie[stop] for stop, (value, _) in zip(rows, best, strict=True)}
    return path(chosen, problem.num_layers)


def _pick(
    spans: list[tuple[int, int]], tops: list[int], marks: list[int], *, values: list[int], bound: int
) -> list[tuple[int, int]]:
    """For each row, a cut behind a stage: the best value and column, a cut before it. From the middle row outwards.

    The columns that can lead to a row lie in its span, as far as memory and time without wires say. The stage between the two
    costs tops[row] - marks[column], at most `bound`; `values` are the tie-breaks of the stages before each column.

    Where tops and marks rise, the best column never moves left as the row moves right: squares of differences are convex, and
    a part of an allowed stage is allowed, so choices that cross never pay. Each half then has the columns on its side. Else a
    longer stage may cost less, because less crosses its ends, and every column is looked at.
    """
    rising = sorted(tops) == tops and sorted(marks) == marks
    best = [(0, 0)] * len(tops)
    stack = [(0, len(tops), 0, len(marks))]
    while stack:
        top, bottom, left, right = stack.pop()
        if top >= bottom:
            continue
        row = (top + bottom) // 2
        here, least = tops[row], tops[row] - bound
        columns = range(max(left, spans[row][0]), min(right, spans[row][1]))
        best[row] = min((values[c] + (here - marks[c]) ** 2, c) for c in columns if marks[c] >= least)
        column = best[row][1]
        stack.append((top, row, left, column + 1 if rising else right))
        stack.append((row + 1, bottom, column if rising else left, right))
    return best
