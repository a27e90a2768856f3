"""The exact answer where the stages of a rank are summed: memory of a rank with several stages, or its whole time.

Ranks are placed one after another, each with all its stages at once. Between two ranks only the *open* cuts matter:
those with a placed stage on one side only. For a V these are two numbers, for a loop of two rounds three, so a table
over them is small, and each rank's sums are whole when they are checked.

    V, 4 stages, 2 ranks:   rank 0 takes [0, c1) and [c3, n)      open: c1, c3
                            rank 1 takes [c1, c2) and [c2, c3)    open: none
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import cache
from itertools import accumulate, groupby
from typing import Literal, NamedTuple

from penstock.balance.chain import Layers, sweep, windows
from penstock.balance.problem import Problem

_MOST_STEPS = 1_000_000  # some seconds


class TooLarge(Exception):
    """The table would take minutes; `balance` turns this into an error that says what to do."""


# What is bounded and made as small as possible: the cost of the slowest stage, or of the slowest rank, or the bytes that the
# fullest rank has over its limit.
Goal = Literal["stage", "rank", "excess"]


class Turn(NamedTuple):
    """One rank's turn: known before the search, whatever the cuts will be."""

    rank: int
    stages: tuple[int, ...]
    # For each new cut: the nearest known boundaries below and above.
    near: dict[int, tuple[int, int]]
    # Open boundaries after the turn.
    after: tuple[int, ...]
    # Runs of stages not yet placed after the turn, as boundary pairs, and the ranks that will take them.
    runs: tuple[tuple[int, int], ...]
    ranks_left: tuple[int, ...]


def plan_turns(problem: Problem) -> Iterator[Turn]:
    """Place next the rank that leaves the fewest open boundaries."""
    stages, known, placed = problem.num_stages, {0, problem.num_stages}, set[int]()
    left = list(range(problem.num_ranks))

    def open_after(rank: int) -> tuple[int, ...]:
        done = placed.union(problem.rank_stages[rank])
        return tuple(cut for cut in range(1, stages) if (cut - 1 in done) != (cut in done))

    while left:
        rank = min(left, key=lambda r: (len(open_after(r)), r))
        left.remove(rank)
        after, own, near = open_after(rank), problem.rank_stages[rank], {}
        for cut in (cut for stage in own for cut in (stage, stage + 1)):
            if cut not in known:
                near[cut] = (max(k for k in known if k < cut), min(k for k in known if k > cut))
                known.add(cut)
        placed.update(own)
        waiting = [list(run) for free, run in groupby(range(stages), lambda s: s not in placed) if free]
        yield Turn(rank, own, near, after, tuple((run[0], run[-1] + 1) for run in waiting), tuple(left))


# Open cuts -> value so far, and every cut; those that are not known yet are -1.
Table = dict[tuple[int, ...], tuple[int, tuple[int, ...]]]


class Search:
    """One pass over all ranks: every way to stay within `bound`, and the best of them."""

    def __init__(self, problem: Problem, goal: Goal, *, bound: int, ties: bool, budget: list[int]) -> None:
        self.problem, self.goal, self.bound, self.ties, self.budget = problem, goal, bound, ties, budget
        spare = bound if goal == "excess" else 0
        self.limits = None if problem.limits is None else tuple(limit + spare for limit in problem.limits)
        self.most = problem.ceiling if goal == "excess" else bound  # that a stage may cost, or a rank
        self.longest = self.most // min(problem.weights)  # that any stage may take, as it is
        by_layer = zip(*map(problem.layer_memory, problem.in_flight), strict=True)
        self.least_memory = [0, *accumulate(map(min, by_layer))]
        self.tie_cuts = [problem.tie_cut(k) for k in range(problem.num_stages + 1)] if ties else []
        self.groups = cache(problem.groups)
        self.reach: Layers = []

    def run(self) -> tuple[int, tuple[int, ...]] | None:
        """The best value and its cuts; None when nothing stays within the bound."""
        problem, limits = self.problem, self.limits
        reach = sweep(problem, self.most, windows(problem, limits))
        if reach is None:
            return None
        self.reach = reach
        table: Table = {(): (0, (0, *(-1,) * (problem.num_stages - 1), problem.num_layers))}
        for turn in plan_turns(problem):
            states, table = table, {}
            left = []  # sums before each cut, and the most that the ranks that are left can take of them
            if self.goal == "rank":
                left.append((problem.prefix, self.most * len(turn.ranks_left)))
            if limits is not None:
                left.append((self.least_memory, sum(limits[rank] for rank in turn.ranks_left)))
            for before, known in states.values():
                cuts = list(known)
                for value in self._placed(turn, cuts, before):
                    for sums, most in left:
                        if sum([sums[cuts[high]] - sums[cuts[low]] for low, high in turn.runs]) > most:
                            break
                    else:
                        after = tuple([cuts[cut] for cut in turn.after])
                        if after not in table or value < table[after][0]:
                            table[after] = value, tuple(cuts)
        return table.get(())

    def _placed(self, turn: Turn, cuts: list[int], before: int) -> Iterator[int]:
        """Write every choice of new cuts for this rank into `cuts`, one after another, and give the value of each."""
        problem, sums = self.problem, self.goal == "rank"
        limit = None if self.limits is None else self.limits[turn.rank]

        def place(index: int, *, cost: int, tie: int, memory: int, used: frozenset[str]) -> Iterator[int]:
            """The stages of the rank from this one on; `cost` is that of those before, or of the slowest of them."""
            if index == len(turn.stages):
                figure = memory - (limit or 0) + self.bound if self.goal == "excess" else cost
                yield before + tie if self.ties else max(before, figure)
                return
            stage = turn.stages[index]
            new_start, new_stop = cuts[stage] < 0, cuts[stage + 1] < 0
            ends, starts, sizes = problem.ends(stage), problem.starts(stage), problem.memory_prefix[stage]
            for start in self._choices(turn, stage, cuts) if new_start else (cuts[stage],):
                cuts[stage] = start
                for stop in self._choices(turn, stage + 1, cuts) if new_stop else (cuts[stage + 1],):
                    self.budget[0] -= 1
                    here = problem.weights[stage] * (ends[stop] - starts[start])
                    total = cost + here if sums else max(cost, here)
                    groups = self.groups(start, stop) - used if problem.group_states else used
                    more = memory + sizes[stop] - sizes[start] + (problem.group_memory(groups) if groups else 0)
                    if total <= self.most and (limit is None or more <= limit):
                        cuts[stage + 1] = stop
                        add = here * here + self.tie_cuts[stage + 1][stop] if self.ties else 0
                        yield from place(index + 1, cost=total, tie=tie + add, memory=more, used=used | groups)
                if new_stop:
                    cuts[stage + 1] = -1
            if new_start:
                cuts[stage] = -1
            if self.budget[0] < 0:
                raise TooLarge

        return place(0, cost=0, tie=0, memory=0, used=frozenset())

    def _choices(self, turn: Turn, cut: int, cuts: list[int]) -> list[int]:
        """Positions for a new cut that leave every stage between known cuts a layer, and time enough."""
        low, high = turn.near[cut]
        prefix, bound = self.problem.prefix, self.longest
        first = max(cuts[low] + cut - low, bisect_left(prefix, prefix[cuts[high]] - (high - cut) * bound))
        last = min(cuts[high] - (high - cut), bisect_right(prefix, prefix[cuts[low]] + (cut - low) * bound) - 1)
        self.budget[0] -= last - first
        reach = self.reach[cut]
        return [position for position in range(first, last + 1) if position in reach]


def best(problem: Problem, goal: Goal, *, least: int, most: int) -> int | None:
    """The least possible value of the goal between the two; None when even `most` is not enough."""
    budget = [_MOST_STEPS]
    bound, step = least, max(1, least >> 8)
    while True:
        found = Search(problem, goal, bound=bound, ties=False, budget=budget).run()
        if found is not None:
            return found[0]
        if bound >= most:
            return None
        bound, step = min(most, least + step), step * 4


def settle(problem: Problem, goal: Goal, bound: int) -> tuple[int, ...]:
    """Of all cuts within the bound: the least bytes between ranks, then the smallest sum of squared stage costs."""
    found = Search(problem, goal, bound=bound, ties=True, budget=[_MOST_STEPS]).run()
    assert found is not None, "settle is asked only for a bound that best has found"
    return found[1]
