"""Pass: gather the parameters of sharded stages before use, and drop them after it."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.checks import check_types
from penstock.errors import PlanError
from penstock.plan import Plan
from penstock.plan.actions import OP, key_of, parts, stage_of
from penstock.plan.ops import COMPUTES, Op


def add_unshard_reshard(plan: Plan, max_unsharded: int = 3) -> Plan:
    """UNSHARD before use, RESHARD after it, with at most `max_unsharded` stages of a rank unsharded at a time.

        add_unshard_reshard(get_schedule("1f1b")(2, 4), max_unsharded=3)

    The stages that are used next are gathered ahead; a stage that is not among the next `max_unsharded` makes room. (An
    overlapped pair needs both its stages at once, whatever the limit.)
    """
    check_types("add_unshard_reshard", PlanError, plan=(plan, Plan), max_unsharded=(max_unsharded, int))
    return plan.with_codes(unshard_reshard(codes, max_unsharded) for codes in plan.codes)


def unshard_reshard(codes: Sequence[int], max_unsharded: int = 3) -> list[int]:
    """Add UNSHARD and RESHARD to the list of one rank."""
    if max_unsharded < 1:
        raise PlanError(f"max_unsharded={max_unsharded}; a stage must be unsharded to compute: expected at least 1")
    active: set[int] = set()
    lowered: list[int] = []
    for code, wanted in zip(codes, _next_stages(codes, max_unsharded), strict=True):
        if code & OP not in COMPUTES:
            lowered.append(code)
            continue
        lowered += [key_of(Op.RESHARD, stage) for stage in sorted(active.difference(wanted))]
        lowered += [key_of(Op.UNSHARD, stage) for stage in wanted if stage not in active]
        lowered.append(code)
        active = set(wanted)
    lowered += [key_of(Op.RESHARD, stage) for stage in sorted(active)]
    return lowered


def _next_stages(codes: Sequence[int], count: int) -> list[list[int]]:
    """For each slot: the stages that are used next, from there on, the soonest first."""
    coming: dict[int, int] = {}  # by stage, the soonest first: the slot that uses it next
    found = []
    for slot in reversed(range(len(codes))):
        here = {stage_of(part): slot for part in parts(codes[slot]) if part & OP in COMPUTES}
        coming = here | {stage: at for stage, at in coming.items() if stage not in here}
        slots = [*coming.values()]
        pair = len(slots) > count and slots[count - 1] == slots[count]  # the other half of an overlapped pair
        found.append([*coming][: count + pair])
    return found[::-1]
