"""Positions of actions in the list of a rank, for all microbatches at once.

>>> from penstock.plan.actions import forward, key_of
>>> from penstock.plan.ops import Op
>>> positions = {forward(0, 0): 0, forward(0, 1): 1, forward(0, 2): 2}
>>> places(positions, key_of(Op.F, 0), 4)
[0, 1, 2, -1]

Plans hold millions of actions but few keys (see `penstock.plan.actions`). What asks about *columns*, one entry a
microbatch, takes no step of Python for each action, and so is about five times as quick.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Final

from penstock.plan.actions import MICROBATCH_SHIFT, OP, parts
from penstock.plan.ops import COUNTED, MESSAGES

ABSENT: Final = -1
STEP: Final = 1 << MICROBATCH_SHIFT  # from a packed action to that of the next microbatch
_FREE: Final = 1_000_000  # places that are made whatever a plan holds: 8 MB
_COLUMNS: Final = len(COUNTED - MESSAGES)  # of one stage at the most, one of which, that of its F, must be full


def flatten(codes: Sequence[int], keys: Iterable[int]) -> tuple[Sequence[int], Sequence[int]]:
    """The actions of a list that belong to a microbatch, overlapped pairs taken apart, and the position of each.

    `keys` are the keys in the list: mostly they tell that there is nothing to take apart or to leave out.
    """
    if all(key & OP in COUNTED for key in keys):
        return codes, range(len(codes))
    flat = [(part, position) for position, code in enumerate(codes) for part in parts(code) if part & OP in COUNTED]
    return [part for part, _ in flat], [position for _, position in flat]


def column(key: int, num_microbatches: int) -> range:
    """The packed actions with this key, one a microbatch."""
    return range(key, key + num_microbatches * STEP, STEP)


def is_sparse(num_columns: int, num_microbatches: int, num_actions: int) -> bool:
    """Return True if there are too few actions for that many columns: an F or a message is missing, and no columns are made.

    The numbers of microbatches in a plan file of a hundred bytes may go up to sixteen million.

    >>> is_sparse(4, 1_000_000, 4_000_000), is_sparse(4, 1_000_000, 4)
    (False, True)
    """
    return num_columns * num_microbatches > _FREE + _COLUMNS * num_actions


def places(standing: dict[int, int], key: int, num_microbatches: int) -> list[int]:
    """The positions of the actions with this key, by microbatch; `ABSENT` where there is none."""
    return list(map(standing.get, column(key, num_microbatches), repeat(ABSENT)))


def either(half: list[int], whole: list[int]) -> list[int]:
    """The positions of an I (or W), which is there by itself or as half of a B."""
    return list(map(max, half, whole)) if max(whole) > ABSENT else half
