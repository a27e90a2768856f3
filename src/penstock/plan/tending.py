"""The part of the check that is about parameters: nothing is used while sharded, every gradient is reduced, once."""

from __future__ import annotations

from penstock.errors import IncompleteError, OrderError
from penstock.plan.actions import OP, STAGE, STAGE_SHIFT, Op, parts, text
from penstock.plan.plan import Plan


def check_tending(plan: Plan, rank: int) -> set[int]:
    """Go through the list of one rank; the stages whose gradients are reduced."""
    codes = plan.codes[rank]
    tended = Tending(plan, rank, {code >> STAGE_SHIFT & STAGE for code in codes if code & OP == Op.UNSHARD})
    for position, code in enumerate(codes):
        for part in parts(code):
            op, stage = part & OP, part >> STAGE_SHIFT & STAGE
            where = f"rank {rank}, position {position + 1}: {text(part)}"
            if op <= Op.B:
                tended.use(stage, Op(op), where)
            elif op > Op.RECV_B:
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

    def use(self, stage: int, op: Op, where: str) -> None:
        if stage in self.sharded and stage not in self.gathered:
            raise OrderError(f"{where} uses stage {stage} while it is sharded")
        if op is not Op.F and stage in self.reduced:
            raise OrderError(f"{where} comes after {stage}REDUCE_GRAD; its gradient would not be reduced")
        if op in (Op.W, Op.B):
            self.backwards[stage] -= 1

    def tend(self, stage: int, op: Op, where: str) -> None:
        if stage not in self.stages:
            raise IncompleteError(f"{where} is on the wrong rank; here are the stages {self.stages}")
        if op is Op.UNSHARD:
            if stage in self.gathered:
                raise OrderError(f"{where} comes while stage {stage} is unsharded already")
            self.gathered.add(stage)
        elif op is Op.RESHARD:
            if stage not in self.gathered:
                raise OrderError(f"{where} comes while stage {stage} is not unsharded")
            self.gathered.remove(stage)
        else:
            if stage in self.reduced:
                raise IncompleteError(f"{where} stands twice; expected it once, after the last backward")
            if self.backwards[stage]:
                raise OrderError(
                    f"{where} stands before the last backward of its stage; {self.backwards[stage]} follow"
                )
            self.reduced.add(stage)
