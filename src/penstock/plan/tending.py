"""The part of the check that is about parameters: nothing is used while sharded, every gradient is reduced, once."""

from __future__ import annotations

from penstock.errors import IncompleteError, OrderError, PlanError
from penstock.plan.actions import OP, parts, stage_of, text
from penstock.plan.ops import CARES, COMPUTES, TRAINING, WEIGHT_GRADIENTS, Op
from penstock.plan.plan import Plan


def check_tending(plan: Plan, rank: int) -> set[int]:
    """Go through the list of one rank; the stages whose gradients are reduced."""
    tended = _Tending(plan, rank)
    for position, code in enumerate(plan.codes[rank]):
        for part in parts(code):
            if wrong := tended.wrong(part & OP, stage_of(part)):
                error, why = wrong
                raise error(f"rank {rank}, position {position + 1}: {text(part)} {why}")
    for left in tended.gathered:
        raise IncompleteError(f"rank {rank} leaves stage {left} unsharded; expected {left}RESHARD before the next step")
    return tended.reduced


class _Tending:
    """The parameters of one rank's stages while its list is gone through."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.backwards = dict.fromkeys(plan.placement.stages_of(rank), plan.num_microbatches)  # that are still to come
        # the stages that are ever unsharded, so not at hand otherwise
        self.sharded = {stage_of(code) for code in plan.codes[rank] if code & OP == Op.UNSHARD}
        self.gathered: set[int] = set()
        self.reduced: set[int] = set()

    def wrong(self, op: int, stage: int) -> tuple[type[PlanError], str] | None:
        """What is wrong with an action of the list, said without its place."""
        if op not in CARES:
            if op not in COMPUTES:
                return None
            self.backwards[stage] -= op in WEIGHT_GRADIENTS
            if stage in self.sharded and stage not in self.gathered:
                return OrderError, f"uses stage {stage} while it is sharded"
            if op in TRAINING and stage in self.reduced:
                return OrderError, f"comes after {stage}REDUCE_GRAD; its gradient would not be reduced"
        elif stage not in self.backwards:
            return IncompleteError, f"is on the wrong rank; here are the stages {(*self.backwards,)}"
        elif op == Op.UNSHARD:
            if stage in self.gathered:
                return OrderError, f"comes while stage {stage} is unsharded already"
            self.gathered.add(stage)
        elif op == Op.RESHARD:
            if stage not in self.gathered:
                return OrderError, f"comes while stage {stage} is not unsharded"
            self.gathered.remove(stage)
        elif op == Op.REDUCE_GRAD:
            if stage in self.reduced:
                return IncompleteError, "stands twice; expected it once, after the last backward"
            if left := self.backwards[stage]:
                return OrderError, f"stands before the last backward of its stage; {left} follow"
            self.reduced.add(stage)
        else:
            return IncompleteError, "is of a kind of which no rule says where it may stand; see penstock.plan.tending"
        return None
