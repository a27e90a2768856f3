"""V-Min (arXiv 2405.15362): the least memory of the V-shaped schedules, about a third of 1F1B's.

Three ranks, two stages each, three microbatches::

    rank 0  0F0 0F1 .   .   .   5F0 5I0 5W0 0F2 .   .   5F1 5I1 0I0 0W0 5W1 .   5F2 5I2 0I1 0W1 5W2 .   .   0I2 0W2
    rank 1  .   1F0 .   .   4F0 1F1 .   4I0 4W0 .   4F1 1F2 1I0 4I1 1W0 4W1 4F2 .   1I1 4I2 1W1 4W2 .   1I2 1W2 .
    rank 2  .   .   2F0 3F0 .   .   2F1 .   3I0 3F1 3W0 2I0 2F2 2W0 3I1 3F2 3W1 2I1 2W1 .   3I2 3W2 2I2 2W2 .   .

Neighbours follow one another at once, so a microbatch passes in about four slots a rank; the peak is about
`(num_ranks + 4) / 3` microbatches, and the bubble about two thirds of 1F1B's.
"""

from __future__ import annotations

from penstock.schedules import v_block
from penstock.schedules.registry import Sizes


def rank_actions(sizes: Sizes, rank: int) -> list[int]:
    # Forwards and backwards of a stage are 2p, or 2p + 4, slots apart: whichever is no multiple of six.
    turn = 3 if sizes.num_ranks % 3 == 0 else 1
    return v_block.rank_actions((1, 1, 1, 1), (turn, 1, turn), sizes, rank)
