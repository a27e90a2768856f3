"""Pass: make several stages of each, on the same rank, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.checks import check_types
from penstock.errors import PlanError
from penstock.plan import Op, Placement, Plan, StageGraph
from penstock.plan.actions import OP, STAGE, STAGE_SHIFT, overlap, parts, stage_of, text
from penstock.plan.ops import COMPUTES


def divide(plan: Plan, pieces: int) -> Plan:
    """The plan for stages that are cut into so many pieces each: forwards in order, backwards from the last piece.

    >>> from penstock.lower import recompute
    >>> from penstock.schedules import get_schedule
    >>> print(*recompute(divide(get_schedule("1f1b")(2, 2), 2)).lines(), sep="\\n")
    rank 0: 0F0 1F0 0F1 1F1 1R0 1B0 0R0 0B0 1R1 1B1 0R1 0B1
    rank 1: 2F0 3F0 3B0 2R0 2B0 2F1 3F1 3B1 2R1 2B1

    No rank computes anything else, or in another order, and ranks are sent the same messages. But each piece can hold less by
    itself: recomputed, a rank holds the inputs of the pieces, and what one piece saved. Do it before `recompute` and
    `offload`. A message goes from the last piece of a stage to the first piece of another.
    """
    check_types("divide", PlanError, plan=(plan, Plan), pieces=(pieces, int))
    if pieces < 1:
        raise PlanError(f"stages in {pieces} pieces; expected at least 1")
    if pieces == 1:
        return plan
    for codes in plan.codes:
        for code in codes:
            if code & OP not in COMPUTES or code & OP == Op.R:
                raise PlanError(
                    f"divide: the plan has {text(code)}; expected computing alone. Divide first, then recompute or offload, "
                    "then lower"
                )
    edges = [(s * pieces + k, s * pieces + k + 1) for s in range(plan.num_stages) for k in range(pieces - 1)]
    edges += [(producer * pieces + pieces - 1, consumer * pieces) for producer, consumer in plan.graph.edges]
    return replace(
        plan,
        placement=Placement.of([rank for rank in plan.placement.ranks for _ in range(pieces)]),
        graph=StageGraph.of(plan.num_stages * pieces, edges),
        codes=tuple(tuple(_divided(codes, pieces)) for codes in plan.codes),
        name=f"{plan.name} in {pieces} pieces" if plan.name else "",
        family=None,
    )


def _divided(codes: tuple[int, ...], pieces: int) -> Iterator[int]:
    for code in codes:
        for pair in zip(*(_pieces(part, pieces) for part in parts(code)), strict=True):
            yield overlap(*pair) if len(pair) > 1 else pair[0]


def _pieces(code: int, pieces: int) -> list[int]:
    """The same action of each piece of its stage."""
    first = stage_of(code) * pieces
    whole = [code & ~(STAGE << STAGE_SHIFT) | (first + k) << STAGE_SHIFT for k in range(pieces)]
    return whole if code & OP == Op.F else whole[::-1]
