"""Pass: move what forwards saved off the device, and back before their backwards, beside the computing."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from penstock.checks import check_types
from penstock.errors import PlanError
from penstock.lower.stage_selection import Life, Stages, Wanted, inserted, lives, wanted
from penstock.plan import Op, Plan
from penstock.plan.actions import OP, microbatch_of, stage_of, with_op
from penstock.plan.ops import BESIDE, COMPUTES
from penstock.simulate import Costs, Timeline, simulate

_LEADS = (1.0, 1.5, 2.0, 3.0, 4.0)  # how early a load is posted, in times that it takes
_ROUNDING = 1e-9


def offload(plan: Plan, stages: Stages = None, *, costs: Costs | None = None) -> Plan:
    """The plan with an O after the forward and an L before the backward of every microbatch, of some stages, or of some
    microbatches of a stage.

    >>> from penstock.schedules import get_schedule
    >>> print(*offload(get_schedule("gpipe")(1, 3)).lines(), sep="\\n")
    rank 0: 0F0 0O0 0F1 0O1 0L0 0F2 0O2 0L1 0B0 0L2 0B1 0B2

    Copies run beside the computing, on the copy engine of the rank. Without `costs` a load is posted one computation ahead
    of the backward, and a microbatch is left alone if its backward follows within one. Given `costs`, a load is posted as
    late as it can be and still make nobody wait, and a microbatch is left alone if there is no time to move it away and
    back. What lives longest saves most: of several stages on a rank, the first.
    """
    check_types("offload", PlanError, plan=(plan, Plan), costs=(costs, Costs | None))
    asked = wanted(plan, stages)
    if costs is None:
        return plan.with_codes(_without_costs(plan, rank, asked) for rank in range(plan.num_ranks))
    base = simulate(plan, costs)
    tried = [
        simulate(plan.with_codes(_by_times(base, rank, asked, costs, lead) for rank in range(plan.num_ranks)), costs)
        for lead in _LEADS
    ]
    return min(tried, key=lambda timeline: (round(timeline.makespan, 9), max(timeline.peak_memory))).plan


def _without_costs(plan: Plan, rank: int, asked: Wanted) -> list[int]:
    codes = plan.codes[rank]
    computing = [slot for slot, code in enumerate(codes) if code & OP in COMPUTES]
    found = ((life, computing[bisect_right(computing, life.backward) - 2]) for life in lives(plan, rank, asked))
    return _inserted(codes, [(life, slot) for life, slot in found if life.between > 1])


def _by_times(base: Timeline, rank: int, asked: Wanted, costs: Costs, lead: float) -> list[int]:
    """Loads, the last first: each ends when it is used, or when the engine begins the one after it."""
    codes, starts, ends = base.plan.codes[rank], base.starts[rank], base.ends[rank]
    occupying = [slot for slot, code in enumerate(codes) if code & OP not in BESIDE]
    begins = [starts[slot] for slot in occupying]
    free = float("inf")
    found = []
    for life in sorted(lives(base.plan, rank, asked), key=lambda life: -starts[life.backward]):
        takes = _copy(Op.L, life, costs)
        latest = min(starts[life.backward], free) - takes
        at = max(bisect_right(begins, latest - (lead - 1) * takes) - 1, 0)
        if latest - ends[life.forward] >= _copy(Op.O, life, costs) and occupying[at] > life.forward:
            free = latest
            found.append(_Move(life, occupying[at], ends[life.forward], ends[occupying[at - 1]], starts[life.backward]))
    while (late := _too_much(found, costs)) is not None:
        found.remove(late)
    return _inserted(codes, [(move.life, move.slot) for move in found])


class _Move(NamedTuple):
    """A life that is to be moved away and back, and the times of the rank that matter to it."""

    life: Life
    slot: int  # its load is posted before the action in this slot
    away: float  # when its offload is posted
    back: float  # when its load is posted
    due: float  # when it is used


def _too_much(moves: list[_Move], costs: Costs) -> _Move | None:
    """The move to give up so that no load comes late, if one does: the shortest of those that keep the engine busy then."""
    posted = [(move.life.forward, 1, move.away, move) for move in moves] + [(m.slot, 0, m.back, m) for m in moves]
    free, busy = 0.0, list[_Move]()
    for _, is_offload, time, move in sorted(posted, key=lambda each: each[:2]):
        if time > free:
            busy.clear()
        busy.append(move)
        free = max(free, time) + _copy(Op.O if is_offload else Op.L, move.life, costs)
        if not is_offload and free > move.due * (1 + _ROUNDING):
            return min(busy, key=lambda each: each.due - each.away)
    return None


def _copy(op: Op, life: Life, costs: Costs) -> float:
    """Return the time for which a copy occupies the copy engine."""
    return costs.time(op, stage_of(life.code)) * costs.scale(microbatch_of(life.code))


def _inserted(codes: tuple[int, ...], found: Iterable[tuple[Life, int]]) -> list[int]:
    """The list with its copies: an O after the slot of its forward, an L before its slot, in the order of use."""
    offloads: defaultdict[int, list[int]] = defaultdict(list)
    loads: defaultdict[int, list[int]] = defaultdict(list)
    for life, slot in sorted(found, key=lambda each: each[0].backward):
        offloads[life.forward].append(with_op(life.code, Op.O))
        loads[slot].append(with_op(life.code, Op.L))
    return inserted(codes, loads, offloads)
