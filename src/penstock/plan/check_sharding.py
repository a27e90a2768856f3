"""Checks of sharded parameters: no stage is used while sharded, and each gradient is reduced exactly once."""

from __future__ import annotations

from penstock.errors import IncompleteError, OrderError, PlanError
from penstock.plan.actions import OP, parts, stage_of, text
from penstock.plan.ops import CARES, COMPUTES, TRAINING, WEIGHT_GRADIENTS, Op
from penstock.plan.plan import Plan


def check_sharding(plan: Plan, rank: int) -> set[int]:
    """Go through the list of one rank; the stages whose gradients are reduced."""
    codes = plan.codes[rank]
    backwards = dict.fromkeys(plan.placement.stages_of(rank), plan.num_microbatches)  # that are still to come
    sharded = {stage_of(code) for code in codes if code & OP == Op.UNSHARD}  # ever, so not at hand otherwise
    gathered, reduced = set[int](), set[int]()
    for position, part in ((position, part) for position, code in enumerate(codes) for part in parts(code)):
        op, stage = part & OP, stage_of(part)
        wrong: tuple[type[PlanError], str] | None = None
        if op in COMPUTES:
            backwards[stage] -= op in WEIGHT_GRADIENTS
            if stage in sharded and stage not in gathered:
                wrong = OrderError, f"uses stage {stage} while it is sharded"
            elif op in TRAINING and stage in reduced:
                wrong = OrderError, f"comes after {stage}REDUCE_GRAD; its gradient would not be reduced"
        elif op in CARES and stage not in backwards:
            wrong = IncompleteError, f"is on the wrong rank; here are the stages {(*backwards,)}"
        elif op == Op.UNSHARD:
            if stage in gathered:
                wrong = OrderError, f"comes while stage {stage} is unsharded already"
            gathered.add(stage)
        elif op == Op.RESHARD:
            if stage not in gathered:
                wrong = OrderError, f"comes while stage {stage} is not unsharded"
            gathered.discard(stage)
        elif op == Op.REDUCE_GRAD:
            if stage in reduced:
                wrong = IncompleteError, "stands twice; expected it once, after the last backward"
            elif left := backwards[stage]:
                wrong = OrderError, f"stands before the last backward of its stage; {left} follow"
            reduced.add(stage)
        elif op in CARES:
            wrong = (
                IncompleteError,
                "is of a kind of which no rule says where it may stand; see penstock.plan.check_sharding",
            )
        if wrong is not None:
            error, why = wrong
            raise error(f"rank {rank}, position {position + 1}: {text(part)} {why}")
    for left in gathered:
        raise IncompleteError(f"rank {rank} leaves stage {left} unsharded; expected {left}RESHARD before the next step")
    return reduced
