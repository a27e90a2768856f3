"""Pass: gather the parameters of sharded stages before use, and drop them after it."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import PlanError
from penstock.misfits import takes
from penstock.plan import Plan
from penstock.plan.actions import OP, key_of, parts, stage_of
from penstock.plan.ops import COMPUTES, Op


@takes(PlanError)
def add_unshard_reshard(plan: Plan, max_unsharded: int = 3) -> Plan:
    """UNSHARD before use, RESHARD after it, with at most `max_unsharded` stages of a rank unsharded at a time.

        add_unshard_reshard(get_schedule("1f1b")(2, 4), max_unsharded=3)

    The stages that are used next are gathered ahead; a stage that is not among the next `max_unsharded` makes room. (An
    overlapped pair needs both its stages at once, whatever the limit.)
    """
    return plan.with_codes(unshard_reshard(codes, max_unsharded) for codes in plan.codes)


def unshard_reshard(codes: Sequence[int], max_unsharded: int = 3) -> list[int]:
    """Add UNSHARD and RESHARD to the list of one rank."""
    if max_unsharded < 1:
        raise PlanError(f"max_unsharded={max_unsharded}; a stage must be unsharded to compute: expected at least 1")
    uses = _uses(codes)
    cursor = dict.fromkeys(uses, 0)
    active: set[int] = set()
    lowered: list[int] = []
    for slot, code in enumerate(codes):
        if code & OP not in COMPUTES:
            lowered.append(code)
            continue
        wanted = _next_stages(slot, uses, cursor, max_unsharded)
        for stage in sorted(active.difference(wanted)):
            lowered.append(key_of(Op.RESHARD, stage))
            active.remove(stage)
        for stage in wanted:
            if stage not in active:
                lowered.append(key_of(Op.UNSHARD, stage))
                active.add(stage)
        lowered.append(code)
    lowered += [key_of(Op.RESHARD, stage) for stage in sorted(active)]
    return lowered


def _uses(codes: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
    """The slots that use each stage, each with its place within the slot."""
    uses: dict[int, list[tuple[int, int]]] = {}
    for slot, code in enumerate(codes):
        for place, part in enumerate(parts(code)):
            if part & OP in COMPUTES:
                uses.setdefault(stage_of(part), []).append((slot, place))
    return uses


def _next_stages(slot: int, uses: dict[int, list[tuple[int, int]]], cursor: dict[int, int], count: int) -> list[int]:
    """The stages that are used next, from `slot` on, the soonest first."""
    coming = []
    for stage, slots in uses.items():
        at = cursor[stage]
        while at < len(slots) and slots[at][0] < slot:
            at += 1
        cursor[stage] = at
        if at < len(slots):
            coming.append((*slots[at], stage))
    coming.sort()
    wanted = coming[:count]
    if len(coming) > count and wanted[-1][0] == coming[count][0]:  # the other half of an overlapped pair
        wanted.append(coming[count])
    return [stage for _, _, stage in wanted]
