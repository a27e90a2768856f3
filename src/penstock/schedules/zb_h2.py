"""ZB-H2 (arXiv 2401.10241): twice the memory of 1F1B, and no bubble when F, I and W take the same time.

Three ranks, six microbatches::

    rank 0  F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 .  .
    rank 1  .  F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5 .
    rank 2  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5

Forwards fill the time until the first gradient comes back; rank r leaves 2r weight backwards for the end, where they
fill the drain. The peak is `2 * num_ranks - 1` microbatches. With fewer microbatches than that it holds all of them.
"""

from __future__ import annotations

from penstock.schedules.loop_common import in_turn
from penstock.schedules.registry import Sizes


def rank_actions(sizes: Sizes, rank: int) -> list[int]:
    return in_turn(sizes, rank, per_hop=2, owed=2 * rank)
