"""solve(job, ...): the whole problem handed to an exact solver, CP-SAT of OR-Tools. It may find better orders, and proves.

    pip install "penstock[solver]"

Every action is an interval on its rank, no two of which overlap; a microbatch's actions follow one another along its chain with
the crossings between; what is held lies in intervals too, whose sum is limited. Microbatches of equal size are done in the order
of their numbers everywhere: in any schedule the k-th action of a kind on a stage may be given to microbatch k, and all holds as
before.

Where a backward in one piece, or a fused pair, takes less than its parts, the actions have the least times that the floor reckons
with: what is proved then holds for these as well.

The solver reckons with whole numbers. Times and memory are multiplied so that they become such, and rounded down where no
small factor does that. Rounded down, every schedule stays possible and none becomes longer, so what is proved is proved; and what
is found is simulated with the costs as they are before anybody believes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import floor as whole
from typing import TYPE_CHECKING, Any

from penstock.errors import PlanError
from penstock.plan.actions import OP, parts, stage_of
from penstock.plan.ops import Op
from penstock.search.integer_scale import whole_factor
from penstock.search.lower_bound import least_times
from penstock.search.search_problem import SearchJob
from penstock.simulate import Timeline

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

_LARGEST = 10**9  # of the whole numbers that the solver is given
_WALL = 30.0  # seconds for each unit of effort after which the solver is stopped in any case
_Orders = tuple[tuple[int, ...], ...]


def solve(job: SearchJob, best: Timeline, *, floor: float, effort: float, seed: int) -> tuple[float, _Orders | None]:
    """Return a lower bound on the makespan, and an order for each rank that may be better. Starts from the best known one.

    `effort` is counted in the solver's own work, a few seconds on one core each: the same arguments give the same answer.
    """
    model = _Model(job, best, floor)
    solver = _cp_model().CpSolver()
    solver.parameters.max_deterministic_time = effort
    solver.parameters.max_time_in_seconds = _WALL * (1 + effort)
    solver.parameters.num_workers = 1  # several would not give the same every time
    solver.parameters.random_seed = seed % 2**31
    status = solver.solve(model.model)
    if status not in (_cp_model().OPTIMAL, _cp_model().FEASIBLE):
        return floor, None
    return max(floor, solver.best_objective_bound / model.scale), model.codes(solver)


def _cp_model() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise PlanError(
            'the exact solver is CP-SAT of OR-Tools, which is not installed; expected it from pip install "penstock[solver]", '
            "or a search without it"
        ) from None
    return cp_model


class _Model:
    """The job as the solver has it."""

    def __init__(self, job: SearchJob, best: Timeline, floor: float) -> None:
        self.job = job
        self.model: cp_model.CpModel = _cp_model().CpModel()
        half, size = job.num_tasks // 2, job.num_microbatches
        forward, back, weight = least_times(job)
        self.scale = _scale((*forward, *back, *weight, *job.crossing), 2 * best.makespan)
        self.horizon = whole(self.scale * best.makespan * (1 + 1e-12)) + 1
        self.began: dict[int, Any] = {}  # by code
        self.ended: dict[int, Any] = {}
        self.intervals: list[list[Any]] = [[] for _ in range(job.placement.num_ranks)]
        hints = {code: start for _, packed, start, _ in best.every() for code in parts(packed)}
        for task, code in enumerate(job.codes):
            rank, cell, later = job.rank_of_link[task // size], self._cell(task), job.code(Op.W, task)
            if task < half:
                self._action(code, forward[cell], rank, hints.get(code))
            else:
                start = hints.get(job.code(Op.B, task))  # what is done in one piece begins with the input gradient
                self._action(code, back[cell], rank, hints.get(code, start))
                self._action(later, weight[cell], rank, hints.get(later) if start is None else start + back[cell])
        self._order()
        for rank, intervals in enumerate(self.intervals):
            self.model.add_no_overlap(intervals)
            self._memory(rank)
        end = self.model.new_int_var(min(whole(self.scale * floor * (1 - 1e-12)), self.horizon), self.horizon, "")
        for code in self.ended:
            if code & OP == Op.W:
                self.model.add(end >= self.ended[code])
        self.model.minimize(end)

    def _cell(self, task: int) -> int:
        """The forward of a task's stage and microbatch: its number, as a task."""
        link, number = divmod(task, self.job.num_microbatches)
        return self.job.stage_of_link[link] * self.job.num_microbatches + number

    def _action(self, code: int, time: float, rank: int, hint: float | None) -> None:
        length = whole(self.scale * time * (1 + 1e-12))
        begin = self.model.new_int_var(0, self.horizon - length, "")
        if hint is not None:
            self.model.add_hint(begin, whole(self.scale * hint + 0.5))
        self.began[code], self.ended[code] = begin, begin + length
        self.intervals[rank].append(self.model.new_fixed_size_interval_var(begin, length, ""))

    def _order(self) -> None:
        """Add precedence constraints: along the chain of a microbatch, and between microbatches of equal size."""
        job, size = self.job, self.job.num_microbatches
        equal = len(set(job.sizes)) == 1
        for task, code in enumerate(job.codes):
            if task + size < job.num_tasks:
                way = whole(self.scale * job.crossing[task] * (1 + 1e-12))
                self.model.add(self.began[job.codes[task + size]] >= self.ended[code] + way)
            both = [(code, job.codes[task + 1])] if equal and (task + 1) % size else []
            if task >= job.num_tasks // 2:
                self.model.add(self.began[job.code(Op.W, task)] >= self.ended[code])
                both += [(job.code(Op.W, task), job.code(Op.W, task + 1))] if both else []
            for first, second in both:
                self.model.add(self.began[second] >= self.ended[first])

    def _memory(self, rank: int) -> None:
        """Add memory constraints: activations from F to I, and the part of them from I to W."""
        job, limit = self.job, self.job.limits[rank]
        mine = range(job.num_tasks // 2, job.num_tasks)
        backs = [task for task in mine if job.rank_of_link[task // job.num_microbatches] == rank]
        if sum(job.held[task] for task in backs) <= limit:
            return
        unit = _scale((*job.held, *job.kept, limit), sum(job.held) + limit)
        spans, demands = [], []
        for task in backs:
            began = self.began[job.codes[self._cell(task)]]
            back, weight = self.ended[job.codes[task]], self.ended[job.code(Op.W, task)]
            held, kept = job.held[task], min(job.held[task], job.kept[task])
            for first, last, what in ((began, back, held), (back, weight, kept)):
                length = self.model.new_int_var(0, self.horizon, "")
                spans.append(self.model.new_interval_var(first, length, last, ""))
                demands.append(whole(unit * what * (1 + 1e-12)))
        self.model.add_cumulative(spans, demands, whole(unit * limit * (1 + 1e-9)))

    def codes(self, solver: cp_model.CpSolver) -> _Orders:
        """The order of each rank."""
        found: list[list[tuple[int, bool, int, int]]] = [[] for _ in self.intervals]
        for number, (code, begin) in enumerate(self.began.items()):
            lasts = solver.value(self.ended[code]) > solver.value(begin)  # what takes no time comes first
            rank = self.job.placement.rank_of(stage_of(code))
            found[rank].append((solver.value(begin), lasts, number, code))
        return tuple(tuple(row[-1] for row in sorted(rows)) for rows in found)


def _scale(numbers: Iterable[float], largest: float) -> float:
    """Return the factor that turns numbers into integers: exactly if a small factor does, and never too large."""
    factor = whole_factor(numbers, at_most=_LARGEST / largest) if largest else 1
    return _LARGEST / 100 / largest if factor is None else float(factor)
