"""How many microbatches a plan holds on each stage."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from penstock.errors import BalanceError
from penstock.misfits import takes
from penstock.plan import Action, Op, Plan
from penstock.plan.actions import parts, unpack

_ROUNDING = 1e-9  # of sums of sizes


@takes(BalanceError)
def in_flight(plan: Plan, microbatches: Sequence[float] | None = None) -> list[tuple[int, int]]:
    """For each stage the most microbatches between F and I (or B), and the most between I and W.

    >>> in_flight(Plan.of({0: ["0F0", "0F1", "0B0", "0B1"], 1: ["1F0", "1I0", "1F1", "1W0", "1I1", "1W1"]}))
    [(2, 0), (1, 1)]

    Where microbatches differ in size (`microbatches`, as in `Costs`), a large one counts for several; the sum is rounded up.

    The two need not fall on the same moment, nor those of two stages of a rank, so the memory that `balance` computes
    from them is enough, and may be more than the plan ever holds.
    """
    sizes = microbatches or (1.0,) * plan.num_microbatches
    held = [[0.0, 0.0] for _ in range(plan.num_stages)]
    most = [[0.0, 0.0] for _ in range(plan.num_stages)]
    for codes in plan.codes:
        for code in codes:
            for part in parts(code):
                action = unpack(part)
                assert isinstance(action, Action), "a part of a pair is no pair"
                now, size = held[action.stage], 0.0 if action.microbatch is None else sizes[action.microbatch]
                match action.op:
                    case Op.F:
                        now[0] += size
                    case Op.B:
                        now[0] -= size
                    case Op.I:
                        now[0] -= size
                        now[1] += size
                    case Op.W:
                        now[1] -= size
                    case _:
                        continue
                most[action.stage] = [max(a, b) for a, b in zip(most[action.stage], now, strict=True)]
    return [(ceil(to_input - _ROUNDING), ceil(to_weight - _ROUNDING)) for to_input, to_weight in most]
