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
            try:
                tended.pass_by(part & OP, stage_of(part))
            except (OrderError, IncompleteError) as error:
                raise type(error)(f"rank {rank}, position {position + 1}: {text(part)} {error}") from None
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

    def pass_by(self, op: int, stage: int) -> None:
        """An action of the list; what is wrong with it is said without its place."""
        if op in COMPUTES:
            if stage in self.sharded and stage not in self.gathered:
                raise OrderError(f"uses stage {stage} while it is sharded")
            if op in TRAINING and stage in self.reduced:
                raise OrderError(f"comes after {stage}REDUCE_GRAD; its gradient would not be reduced")
            self.backwards[stage] -= op in WEIGHT_GRADIENTS
        elif op in CARES:
            if stage not in self.stages:
                raise IncompleteError(f"is on the wrong rank; here are the stages {self.stages}")
            self.tend(stage, Op(op))

    def tend(self, stage: int, op: Op) -> None:
        match op:
            case Op.UNSHARD:
                if stage in self.gathered:
                    raise OrderError(f"comes while stage {stage} is unsharded already")
                self.gathered.add(stage)
            case Op.RESHARD:
                if stage not in self.gathered:
                    raise OrderError(f"comes while stage {stage} is not unsharded")
                self.gathered.remove(stage)
            case Op.REDUCE_GRAD:
                if stage in self.reduced:
                    raise IncompleteError("stands twice; expected it once, after the last backward")
                if left := self.backwards[stage]:
                    raise OrderError(f"stands before the last backward of its stage; {left} follow")
                self.reduced.add(stage)
            case _:
                raise IncompleteError(
                    "is of a kind of which no rule says where it may stand; see penstock.plan.tending"
                )
