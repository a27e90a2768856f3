"""V-Half (arXiv 2405.15362): half the memory of 1F1B, and little more than half of its bubble.

Three ranks, two stages each, three microbatches::

    rank 0  0F0 0F1 .   .   .   5F0 5I0 0F2 5W0 .   5F1 5I1 0I0 0W0 5W1 .   5F2 5I2 0I1 0W1 5W2 .   0I2 0W2
    rank 1  .   1F0 .   .   4F0 1F1 .   4I0 4W0 4F1 1F2 1I0 1W0 4I1 4W1 4F2 1I1 1W1 4I2 4W2 .   1I2 1W2 .
    rank 2  .   .   2F0 3F0 .   .   2F1 3F1 3I0 2I0 2W0 2F2 3W0 3F2 3I1 2I1 2W1 3W1 .   3I2 2I2 2W2 3W2 .

On the way to the last rank neighbours follow one another after two slots, on the way back after one, so a microbatch
passes in about six slots a rank; the peak is about `(num_ranks + 2) / 2` microbatches.
"""

from __future__ import annotations

from penstock.schedules import v_block
from penstock.schedules.registry import Sizes


def rank_actions(sizes: Sizes, rank: int) -> list[int]:
    # An odd number of slots of three lies between the two actions that share a phase modulo three.
    turn, turn_back = (2, 1) if sizes.num_ranks % 2 else (4, 5)
    return v_block.rank_actions((2, 1, 2, 1), (turn, 1, turn_back), sizes, rank)
