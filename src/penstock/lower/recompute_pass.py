"""Pass: hold the inputs of stages alone, and run their forwards again before their backwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from penstock.checks import check_types
from penstock.errors import PlanError
from penstock.lower.stage_selection import Stages, Wanted, inserted, lives, one_a_rank, wanted
from penstock.plan import Op, Plan
from penstock.plan.actions import OP, microbatch_of, parts, stage_of, with_op
from penstock.plan.ops import BESIDE
from penstock.simulate import Costs, Timeline, simulate

_SWEEPS = 8
_ROUNDING = 1e-9


def recompute(
    plan: Plan,
    stages: Stages = None,
    *,
    costs: Costs | None = None,
    memory_limit: float | Sequence[float] | None = None,
) -> Plan:
    """The plan with an R before the backward of every microbatch, of some stages, or of some microbatches of a stage.

    >>> from penstock.schedules import get_schedule
    >>> print(*recompute(get_schedule("1f1b")(2, 3), [0]).lines(), sep="\\n")
    rank 0: 0F0 0F1 0R0 0B0 0F2 0R1 0B1 0R2 0B2
    rank 1: 1F0 1B0 1F1 1B1 1F2 1B2
    >>> print(*recompute(get_schedule("1f1b")(2, 3), {0: [1]}).lines(), sep="\\n")
    rank 0: 0F0 0F1 0B0 0F2 0R1 0B1 0B2
    rank 1: 1F0 1B0 1F1 1B1 1F2 1B2

    The forward then leaves its input alone. A backward that follows its forward at once is given no R: there is nothing to
    be saved by it. An R stands right before its backward, and needs nothing from other ranks, so it runs while the rank
    waits for the gradient. Given `costs`, those that would not run in a wait are moved up into an earlier one where that
    makes the step shorter, as far as `memory_limit` (as in `Timeline.peak_memory`, one number or one a rank) allows; without
    a limit, as far as no rank's peak grows.
    """
    check_types("recompute", PlanError, plan=(plan, Plan), costs=(costs, Costs | None))
    check_types("recompute", PlanError, memory_limit=(memory_limit, float | Sequence[float] | None))
    asked = wanted(plan, stages)
    made = plan.with_codes(_with_recompute(plan, rank, asked) for rank in range(plan.num_ranks))
    return made if costs is None else _moved_up(made, costs, memory_limit)


def recompute_rank(plan: Plan, rank: int) -> Plan | None:
    """Recompute the stages of a rank; all stages, if those are recomputed already; None if all are.

    >>> from penstock.schedules import get_schedule
    >>> plan = recompute_rank(get_schedule("gpipe")(2, 2), 0)
    >>> print(*plan.lines(), sep="\\n")
    rank 0: 0F0 0F1 0R0 0B0 0R1 0B1
    rank 1: 1F0 1F1 1B0 1B1
    >>> print(recompute_rank(recompute_rank(plan, 0), 0))
    None
    """
    everything = recompute(plan)  # what is recomputed or offloaded already stays as it is
    if everything == plan:
        return None
    here = [codes if other == rank else plan.codes[other] for other, codes in enumerate(everything.codes)]
    found = plan.with_codes(here)
    return everything if found == plan else found


def _with_recompute(plan: Plan, rank: int, asked: Wanted) -> list[int]:
    again = {life.backward: [with_op(life.code, Op.R)] for life in lives(plan, rank, asked) if life.between}
    return inserted(plan.codes[rank], again, {})


def _moved_up(plan: Plan, costs: Costs, memory_limit: float | Sequence[float] | None) -> Plan:
    """Sweep after sweep: move Rs up into waits, rank by rank, and keep what makes the step shorter."""
    best = simulate(plan, costs)
    limits = best.peak_memory if memory_limit is None else one_a_rank(memory_limit, plan.num_ranks)
    for _ in range(_SWEEPS):
        before = best.makespan
        for rank, limit in enumerate(limits):
            tried = best
            for _ in range(_SWEEPS):  # what one move brings may show only after the next
                codes = _sweep(tried, rank, costs, limit)
                if tuple(codes) == tried.plan.codes[rank]:
                    break
                rows = [codes if other == rank else row for other, row in enumerate(tried.plan.codes)]
                tried = simulate(plan.with_codes(rows), costs)
                if tried.peak_memory[rank] > max(limit, best.peak_memory[rank]) * (1 + _ROUNDING):
                    break
                if tried.makespan < best.makespan * (1 - _ROUNDING):
                    best = tried
        if best.makespan >= before:
            break
    return best.plan


def _sweep(timeline: Timeline, rank: int, costs: Costs, limit: float) -> list[int]:
    """The list of a rank in which each wait takes the next Rs, as many as it and the memory have room for.

    An R that its backward does not wait for stays where it is: it is in a wait already.
    """
    codes, starts, ends = timeline.plan.codes[rank], timeline.starts[rank], timeline.ends[rank]
    slots = [slot for slot, code in enumerate(codes) if code & OP not in BESIDE]
    begun = {part: slot for slot in slots for part in parts(codes[slot]) if part & OP == Op.F}
    late = deque(a for a, b in pairwise(slots) if codes[a] & OP == Op.R and starts[b] <= ends[a] * (1 + _ROUNDING))
    full, kept = (costs.sizes(what) or () for what in (Op.R.row.takes, Op.R.row.spares))
    moved: dict[int, int] = {}  # from the slot of an R to the one that it goes before
    more: list[tuple[float, float]] = []  # what moved Rs hold more: until when, and how much
    now = 0.0
    for slot in slots:
        while late and late[0] <= slot:
            late.popleft()
        while late:
            place = late[0]
            stage, takes = stage_of(codes[place]), ends[place] - starts[place]
            extra = (full[stage] - kept[stage]) * costs.scale(microbatch_of(codes[place]))
            peak = max((held for time, held in timeline.memory[rank] if now <= time <= starts[place]), default=0.0)
            fits = now + takes <= starts[slot] * (1 + _ROUNDING)
            held = sum(size for until, size in more if until > now)
            if not fits or begun[with_op(codes[place], Op.F)] >= slot or peak + held + extra > limit * (1 + _ROUNDING):
                break
            moved[late.popleft()] = slot
            more.append((starts[place], extra))
            now += takes
        now = ends[slot]
    before = {target: [codes[place] for place in moved if moved[place] == target] for target in moved.values()}
    return [c for slot, code in enumerate(codes) for c in (*before.get(slot, ()), *(() if slot in moved else (code,)))]
