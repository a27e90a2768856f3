"""How many microbatches a plan holds on each stage."""

from __future__ import annotations

from penstock.plan import Action, Op, Plan
from penstock.plan.actions import parts, unpack


def in_flight(plan: Plan) -> list[tuple[int, int]]:
    """For each stage the most microbatches between F and I (or B), and the most between I and W.

    >>> in_flight(Plan.of({0: ["0F0", "0F1", "0B0", "0B1"], 1: ["1F0", "1I0", "1F1", "1W0", "1I1", "1W1"]}))
    [(2, 0), (1, 1)]

    The two need not fall on the same moment, nor those of two stages of a rank, so the memory that `balance` computes
    from them is enough, and may be more than the plan ever holds.
    """
    held = [[0, 0] for _ in range(plan.num_stages)]
    most = [[0, 0] for _ in range(plan.num_stages)]
    for codes in plan.codes:
        for code in codes:
            for part in parts(code):
                action = unpack(part)
                assert isinstance(action, Action), "a part of a pair is no pair"
                now = held[action.stage]
                match action.op:
                    case Op.F:
                        now[0] += 1
                    case Op.B:
                        now[0] -= 1
                    case Op.I:
                        now[0] -= 1
                        now[1] += 1
                    case Op.W:
                        now[1] -= 1
                    case _:
                        continue
                most[action.stage] = [max(a, b) for a, b in zip(most[action.stage], now, strict=True)]
    return [(to_input, to_weight) for to_input, to_weight in most]
