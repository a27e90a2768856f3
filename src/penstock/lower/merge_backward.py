"""Pass: merge an I with the W that follows it into one full backward, which costs less."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from penstock.checks import check_types
from penstock.errors import PlanError
from penstock.plan import Plan, Rules
from penstock.plan.actions import OP, key_of, stage_of, with_op
from penstock.plan.ops import Op


def merge_backward(plan: Plan, *, everywhere: bool = True) -> Plan:
    """Neighbouring I and W of the same stage and microbatch become B.

    A gradient that goes to another rank leaves after the B, not after the I, so a merge may make that rank wait: with
    `everywhere=False` only those are merged whose gradient stays on its rank.

    >>> split = Plan.of([["0F0", "0I0", "0W0"], ["1F0", "1I0", "1W0"]])
    >>> print(*merge_backward(split).lines(), sep="; ")
    rank 0: 0F0 0B0; rank 1: 1F0 1B0
    >>> print(*merge_backward(split, everywhere=False).lines(), sep="; ")
    rank 0: 0F0 0B0; rank 1: 1F0 1I0 1W0
    """
    check_types("merge_backward", PlanError, plan=(plan, Plan), everywhere=(everywhere, bool | int))
    rules = Rules(plan.graph, plan.placement, lowered=True)
    stages_of = plan.placement.stages_of if everywhere else partial(free_stages, rules)
    return plan.with_codes(merge(codes, stages_of(rank)) for rank, codes in enumerate(plan.codes))


def free_stages(rules: Rules, rank: int) -> tuple[int, ...]:
    """The stages of a rank whose gradients no other rank waits for."""
    return tuple(s for s in rules.placement.stages_of(rank) if not rules.sends(key_of(Op.I, s)))


def merge(codes: Sequence[int], stages: Collection[int]) -> Sequence[int]:
    """Merge I and W in the list of one rank, for these stages only."""
    if not stages:
        return codes
    merged: list[int] = []
    for code in codes:
        if code & OP == Op.W and merged and merged[-1] == with_op(code, Op.I) and stage_of(code) in stages:
            merged[-1] = with_op(code, Op.B)
        else:
            merged.append(code)
    return merged
