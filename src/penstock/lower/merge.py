"""Pass: merge an I with the W that follows it into one full backward, which costs less."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.plan import Plan
from penstock.plan.actions import OP, Op


def merge_backward(plan: Plan) -> Plan:
    """Neighbouring I and W of the same stage and microbatch become B."""
    return plan.with_codes(map(merge, plan.codes))


def merge(codes: Sequence[int]) -> list[int]:
    """The same for the list of one rank."""
    merged: list[int] = []
    for code in codes:
        if code & OP == Op.W and merged and merged[-1] == code ^ Op.W ^ Op.I:
            merged[-1] = code ^ Op.W ^ Op.B
        else:
            merged.append(code)
    return merged
