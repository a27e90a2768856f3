"""A plan of forwards alone, for any placement: each rank does its stages, microbatch by microbatch, in their order."""

from __future__ import annotations

from penstock.plan import Action, Op, Placement, Plan


def forward_plan(placement: Placement, num_microbatches: int) -> Plan:
    """Every stage's forward of one microbatch before the next.

    >>> print(*forward_plan(Placement.v(2), 1).lines(), sep="\\n")
    rank 0: 0F0 3F0
    rank 1: 1F0 2F0
    """
    rows = [
        [
            Action(Op.F, stage, microbatch)
            for microbatch in range(num_microbatches)
            for stage in placement.stages_of(rank)
        ]
        for rank in range(placement.num_ranks)
    ]
    return Plan.of(rows, placement=placement, num_microbatches=num_microbatches, name="forward")
