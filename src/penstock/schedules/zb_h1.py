"""ZB-H1 (arXiv 2401.10241): 1F1B with split backwards, and no more memory than it: the bubble shrinks to a third.

Three ranks, five microbatches::

    rank 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
    rank 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
    rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

Rank r leaves r weight backwards for later, when it would wait. The peak is `num_ranks` microbatches on every rank.
"""

from __future__ import annotations

from penstock.schedules.loop_common import in_turn
from penstock.schedules.registry import Sizes


def rank_actions(sizes: Sizes, rank: int) -> list[int]:
    return in_turn(sizes, rank, owed=rank)
