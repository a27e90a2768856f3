"""Pass: reduce the gradients of a stage over its data-parallel replicas, right after its last backward."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.checks import check_types
from penstock.errors import PlanError
from penstock.plan import Plan
from penstock.plan.actions import OP, key_of, parts, stage_of
from penstock.plan.ops import WEIGHT_GRADIENTS, Op


def add_reduce_grad(plan: Plan) -> Plan:
    """REDUCE_GRAD after the last W or B of each stage.

    add_reduce_grad(get_schedule("1f1b")(2, 4))
    """
    check_types("add_reduce_grad", PlanError, plan=(plan, Plan))
    return plan.with_codes(reduce_grad(codes, plan.num_microbatches) for codes in plan.codes)


def reduce_grad(codes: Sequence[int], num_microbatches: int) -> list[int]:
    """Add the reductions to the list of one rank."""
    left: dict[int, int] = {}
    lowered: list[int] = []
    for code in codes:
        lowered.append(code)
        for part in parts(code):
            if part & OP in WEIGHT_GRADIENTS:
                stage = stage_of(part)
                left[stage] = left.get(stage, num_microbatches) - 1
                if left[stage] == 0:
                    lowered.append(key_of(Op.REDUCE_GRAD, stage))
    return lowered
