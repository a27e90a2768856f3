"""Number of microbatches in flight on each stage of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Final

from penstock.checks import check_types
from penstock.errors import BalanceError
from penstock.plan import Op, Plan
from penstock.plan.actions import OP, microbatch_of, parts, stage_of

_ROUNDING = 1e-9  # of sums of sizes
# Of what is held from F to I, and from I to W.
_CHANGES: Final[dict[int, tuple[int, int]]] = {Op.F: (1, 0), Op.I: (-1, 1), Op.W: (0, -1), Op.B: (-1, 0)}


def in_flight(plan: Plan, microbatches: Sequence[float] | None = None) -> list[tuple[int, int]]:
    """For each stage the most microbatches between F and I (or B), and the most between I and W.

    >>> in_flight(Plan.of({0: ["0F0", "0F1", "0B0", "0B1"], 1: ["1F0", "1I0", "1F1", "1W0", "1I1", "1W1"]}))
    [(2, 0), (1, 1)]

    Where microbatches differ in size (`microbatches`, as in `Costs`), a large one counts for several; the sum is rounded up.

    The two need not fall on the same moment, nor those of two stages of a rank, so the memory that `balance` computes
    from them is enough, and may be more than the plan ever holds.
    """
    check_types("in_flight", BalanceError, plan=(plan, Plan), microbatches=(microbatches, Sequence[float] | None))
    sizes = microbatches or (1.0,) * plan.num_microbatches
    held = [[0.0, 0.0] for _ in range(plan.num_stages)]
    most = [[0.0, 0.0] for _ in range(plan.num_stages)]
    for part in (part for codes in plan.codes for code in codes for part in parts(code)):
        if part & OP in _CHANGES:
            stage, size = stage_of(part), sizes[microbatch_of(part)]
            held[stage] = [now + by * size for now, by in zip(held[stage], _CHANGES[part & OP], strict=True)]
            most[stage] = [*map(max, most[stage], held[stage])]
    return [(ceil(to_input - _ROUNDING), ceil(to_weight - _ROUNDING)) for to_input, to_weight in most]
