"""1F1B (PipeDream-Flush, arXiv 2104.04473): one forward, one backward, as soon as the pipeline is full.

Three ranks, four microbatches::

    rank 0  F0 F1 F2 .  . .  .  B0 -  F3 B1 -  .  B2 -  . B3 -
    rank 1  .  F0 F1 .  . B0 -  F2 B1 -  F3 B2 -  .  B3 - .  .
    rank 2  .  .  F0 B0 - F1 B1 -  F2 B2 -  F3 B3 -  .  . .  .

A rank holds the activations of at most `num_ranks - rank` microbatches, however many there are.
"""

from __future__ import annotations

from penstock.schedules.loop_common import in_turn
from penstock.schedules.registry import Sizes


def rank_actions(sizes: Sizes, rank: int) -> list[int]:
    return in_turn(sizes, rank, per_hop=1)
