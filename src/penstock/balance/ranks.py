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
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import accumulate, groupby

from penstock.balance.chain import Layers, sweep, windows
from penstock.balance.problem import Problem

Groups = frozenset[str]

_MOST_STEPS = 1_000_000  # some seconds


class TooLarge(Exception):
    """The table would take minutes; `balance` turns this into an error that says what to do."""


class Goal(Enum):
    """What is bounded and made as small as possible."""

    STAGE = "the cost of the slowest stage"
    RANK = "the cost of the slowest rank"
    EXCESS = "the bytes over the limit of the fullest rank"


@dataclass(frozen=True)
class Turn:
    """One rank's turn: known before the search, whatever the cuts will be."""

    rank: int
    stages: tuple[int, ...]
    # For each new cut: the nearest known boundaries below and above.
    near: dict[int, tuple[int, int]]
    # Open boundaries before and after the turn.
    before: tuple[int, ...]
    after: tuple[int, ...]
    # Runs of stages not yet placed before and after the turn, as boundary pairs.
    waiting: tuple[tuple[int, int], ...]
    runs: tuple[tuple[int, int], ...]
    ranks_left: tuple[int, ...]


def plan_turns(problem: Problem) -> list[Turn]:
    """Place next the rank that leaves the fewest open boundaries."""
    stages, known, placed = problem.num_stages, {0, problem.num_stages}, set[int]()
    left, turns, before = list(range(problem.num_ranks)), list[Turn](), tuple[int, ...]()
    waiting: tuple[tuple[int, int], ...] = ((0, stages),)

    def open_after(rank: int) -> tuple[int, ...]:
        done = placed | set(problem.rank_stages[rank])
        return tuple(cut for cut in range(1, stages) if (cut - 1 in done) != (cut in done))

    while left:
        rank = min(left, key=lambda r: (len(open_after(r)), r))
        after = open_after(rank)
        left.remove(rank)
        own, near = problem.rank_stages[rank], {}
        for cut in (cut for stage in own for cut in (stage, stage + 1)):
            if cut not in known:
                near[cut] = (max(k for k in known if k < cut), min(k for k in known if k > cut))
                known.add(cut)
        placed.update(own)
        runs = tuple(_runs(stages, placed))
        turns.append(Turn(rank, own, near, before, after, waiting, runs, tuple(left)))
        before, waiting = after, runs
    return turns


def _runs(stages: int, placed: set[int]) -> Iterator[tuple[int, int]]:
    for waiting, run in groupby(range(stages), lambda stage: stage not in placed):
        if waiting:
            first, *others = run
            yield first, first + len(others) + 1


# Open cuts -> (value so far, open cuts before, cuts of this turn)
Table = dict[tuple[int, ...], tuple[int, tuple[int, ...], tuple[tuple[int, int], ...]]]


class Search:
    """One pass over all ranks: every way to stay within `bound`, and the best of them."""

    def __init__(self, problem: Problem, goal: Goal, *, bound: int, ties: bool, budget: list[int]) -> None:
        self.problem, self.goal, self.bound, self.ties, self.budget = problem, goal, bound, ties, budget
        spare = bound if goal is Goal.EXCESS else 0
        limits = problem.limits
        self.limits = None if limits is None else tuple(limit + spare for limit in limits)
        self.stage_bound = problem.ceiling if goal is Goal.EXCESS else bound
        self.longest = self.stage_bound // min(problem.weights)  # that any stage may take, as it is
        self.rank_bound = bound if goal is Goal.RANK else problem.ceiling
        by_layer = zip(*map(problem.layer_memory, range(problem.num_stages)), strict=True)
        self.least_memory = [0, *accumulate(map(min, by_layer))]
        self.tie_cuts = [problem.tie_cut(k) for k in range(problem.num_stages + 1)] if ties else []
        self.groups = cache(problem.groups)
        self.reach: Layers = []
        # Bytes that the ranks after each rank's turn may hold together.
        self.room: dict[int, int] = {}

    def run(self) -> tuple[int, tuple[int, ...]] | None:
        """The best value and its cuts; None when nothing stays within the bound."""
        reach = sweep(self.problem, self.stage_bound, windows(self.problem, self.limits))
        if reach is None:
            return None
        self.reach = reach
        turns, tables = plan_turns(self.problem), list[Table]()
        if self.limits is not None:
            self.room = {turn.rank: sum(self.limits[rank] for rank in turn.ranks_left) for turn in turns}
        states: Table = {(): (0, (), ())}
        for turn in turns:
            table: Table = {}
            for key, (value, _, _) in states.items():
                self._take(turn, key, value=value, table=table)
            if not table:
                return None
            tables.append(table)
            states = table
        value = tables[-1][()][0]
        cuts = [0] * self.problem.num_stages + [self.problem.num_layers]
        state: tuple[int, ...] = ()
        for table in reversed(tables):
            _, state, assigned = table[state]
            for cut, position in assigned:
                cuts[cut] = position
        return value, tuple(cuts)

    def _take(self, turn: Turn, key: tuple[int, ...], *, value: int, table: Table) -> None:
        """Try every choice of new cuts for this rank from one state."""
        problem = self.problem
        cuts = [-1] * problem.num_stages + [problem.num_layers]
        cuts[0] = 0
        for cut, position in zip(turn.before, key, strict=True):
            cuts[cut] = position
        limit = None if self.limits is None else self.limits[turn.rank]
        # What this rank must take so that the ranks after it can take the rest.
        need = self._time(turn.waiting, cuts) - len(turn.ranks_left) * self.rank_bound if self.goal is Goal.RANK else 0

        def place(index: int, *, cost: int, worst: int, tie: int, taken: int, memory: int, used: Groups) -> None:
            if index == len(turn.stages):
                over = memory - (limit or 0) + self.bound
                figure = worst if self.goal is Goal.STAGE else cost if self.goal is Goal.RANK else over
                self._emit(turn, key, cuts=cuts, value=value + tie if self.ties else max(value, figure), table=table)
                return
            stage = turn.stages[index]
            new_start, new_stop = cuts[stage] < 0, cuts[stage + 1] < 0
            short = need - taken if index + 1 == len(turn.stages) else 0
            ends, starts, sizes = problem.ends(stage), problem.starts(stage), problem.memory_prefix[stage]
            for start in self._choices(turn, stage, cuts=cuts) if new_start else (cuts[stage],):
                cuts[stage] = start
                for stop in self._choices(turn, stage + 1, cuts=cuts) if new_stop else (cuts[stage + 1],):
                    self.budget[0] -= 1
                    here = problem.weights[stage] * (ends[stop] - starts[start])
                    span = problem.prefix[stop] - problem.prefix[start]
                    if here > self.stage_bound or cost + here > self.rank_bound or span < short:
                        continue
                    groups = self.groups(start, stop) - used if problem.group_states else used
                    more = memory + sizes[stop] - sizes[start]
                    if problem.group_states:
                        more += problem.group_memory(groups)
                    if limit is not None and more > limit:
                        continue
                    cuts[stage + 1] = stop
                    add = here * here + self.tie_cuts[stage + 1][stop] if self.ties else 0
                    place(
                        index + 1, cost=cost + here, worst=max(worst, here), tie=tie + add,
                        taken=taken + span, memory=more, used=used | groups,
                    )  # fmt: skip
                if new_stop:
                    cuts[stage + 1] = -1
            if new_start:
                cuts[stage] = -1
            if self.budget[0] < 0:
                raise TooLarge

        place(0, cost=0, worst=0, tie=0, taken=0, memory=0, used=frozenset())

    def _time(self, runs: tuple[tuple[int, int], ...], cuts: list[int]) -> int:
        """The time of the layers in these runs of stages."""
        return sum(self.problem.prefix[cuts[high]] - self.problem.prefix[cuts[low]] for low, high in runs)

    def _choices(self, turn: Turn, cut: int, *, cuts: list[int]) -> list[int]:
        """Positions for a new cut that leave every stage between known cuts a layer, and time enough."""
        low, high = turn.near[cut]
        prefix, bound = self.problem.prefix, self.longest
        first = max(cuts[low] + cut - low, bisect_left(prefix, prefix[cuts[high]] - (high - cut) * bound))
        last = min(cuts[high] - (high - cut), bisect_right(prefix, prefix[cuts[low]] + (cut - low) * bound) - 1)
        self.budget[0] -= last - first
        reach = self.reach[cut]
        return [position for position in range(first, last + 1) if position in reach]

    def _emit(self, turn: Turn, key: tuple[int, ...], *, cuts: list[int], value: int, table: Table) -> None:
        """Keep the state if the ranks that are left can still hold what is left."""
        if self.goal is Goal.RANK and (self._time(turn.runs, cuts) > len(turn.ranks_left) * self.rank_bound):
            return
        if self.limits is not None:
            least = sum(self.least_memory[cuts[high]] - self.least_memory[cuts[low]] for low, high in turn.runs)
            if least > self.room[turn.rank]:
                return
        after = tuple(cuts[cut] for cut in turn.after)
        old = table.get(after)
        if old is None or value < old[0]:
            table[after] = (value, key, tuple((cut, cuts[cut]) for cut in turn.near))


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
