"""The part of the check that is about parameters: nothing is used while sharded, every gradient is reduced, once."""

from __future__ import annotations

from penstock.errors import IncompleteError, OrderError
from penstock.plan.actions import OP, parts, stage_of, text
from penstock.plan.ops import CARES, COMPUTES, TRAINING, WEIGHT_GRADIENTS, Op
from penstock.plan.plan import Plan


def check_tending(plan: Plan, rank: int) -> set[int]:
    """Go through the list of one rank; the stages whose gradients are reduced."""
    codes = plan.codes[rank]
    tended = Tending(plan, rank, {stage_of(code) for code in codes if code & OP == Op.UNSHARD})
    for position, code in enumerate(codes):
        for part in parts(code):
            op, stage = part & OP, stage_of(part)
            where = f"rank {rank}, position {position + 1}: {text(part)}"
            if op in COMPUTES:
                tended.use(stage, op, where)
            elif op in CARES:
                tended.tend(stage, Op(op), where)
    if tended.gathered:
        left = min(tended.gathered)
        raise IncompleteError(f"rank {rank} leaves stage {left} unsharded; expected {left}RESHARD before the next step")
    return tended.reduced


class Tending:
    """The parameters of one rank's stages while its list is gone through."""

    def __init__(self, plan: Plan, rank: int, sharded: set[int]) -> None:
        self.stages = plan.placement.stages_of(rank)
        self.sharded = sharded  # the stages that are ever unsharded, so not at hand otherwise
        self.gathered: set[int] = set()
        self.backwards = dict.fromkeys(self.stages, plan.num_microbatches)  # weight gradients that are still to come
        self.reduced: set[int] = set()

    def use(self, stage: int, op: int, where: str) -> None:
        if stage in self.sharded and stage not in self.gathered:
            raise OrderError(f"{where} uses stage {stage} while it is sharded")
        if op in TRAINING and stage in self.reduced:
            raise OrderError(f"{where} comes after {stage}REDUCE_GRAD; its gradient would not be reduced")
        if op in WEIGHT_GRADIENTS:
            self.backwards[stage] -= 1

    def tend(self, stage: int, op: Op, where: str) -> None:
        if stage not in self.stages:
            raise IncompleteError(f"{where} is on the wrong rank; here are the stages {self.stages}")
        match op:
            case Op.UNSHARD:
                if stage in self.gathered:
                    raise OrderError(f"{where} comes while stage {stage} is unsharded already")
                self.gathered.add(stage)
            case Op.RESHARD:
                if stage not in self.gathered:
                    raise OrderError(f"{where} comes while stage {stage} is not unsharded")
                self.gathered.remove(stage)
            case Op.REDUCE_GRAD:
                if stage in self.reduced:
                    raise IncompleteError(f"{where} stands twice; expected it once, after the last backward")
                if self.backwards[stage]:
                    left = self.backwards[stage]
                    raise OrderError(f"{where} stands before the last backward of its stage; {left} follow")
                self.reduced.add(stage)
            case _:
                raise IncompleteError(f"{where}: no rule says where it may stand; see penstock.plan.tending")
