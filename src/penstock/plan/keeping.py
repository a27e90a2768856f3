"""The part of the check that is about what forwards saved: it is recomputed or moved, not both, and what leaves comes back.

That nothing is used before it is back is a rule of precedence (`penstock.plan.rules`): a backward needs the R, or the L, of
its microbatch, and an L its O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from penstock.errors import IncompleteError
from penstock.plan.actions import MICROBATCH_SHIFT, OP, stage_of, text, with_op
from penstock.plan.ops import ROWS
from penstock.plan.places import ABSENT


def check_kept(columns: Mapping[int, Sequence[int]], chosen: Sequence[int], rank: int) -> None:
    """`columns` says where each action stands, by key and microbatch; `chosen` are the keys of one rank's choices."""
    there = {key: {m for m, at in enumerate(columns[key]) if at != ABSENT} for key in chosen}
    for key, microbatches in there.items():
        partner = ROWS[key & OP].partner
        alone = microbatches - there.get(with_op(key, partner), set()) if partner is not None else None
        if partner is not None and alone:
            code = key | min(alone) << MICROBATCH_SHIFT
            lacking = text(with_op(code, partner))
            raise IncompleteError(f"rank {rank} has {text(code)} and lacks {lacking}; expected both, or neither")
    for one, other in combinations(chosen, 2):
        twice = there[one] & there[other]
        if twice and stage_of(one) == stage_of(other) and ROWS[one & OP].partner != other & OP:
            field = min(twice) << MICROBATCH_SHIFT
            raise IncompleteError(
                f"rank {rank} has {text(one | field)} and {text(other | field)}; expected one way to hold less of a microbatch"
            )
