"""Interleaved 1F1B (arXiv 2104.04473): 1F1B over several stages a rank, in rounds; the bubble shrinks with the stages.

Two ranks, two stages each, four microbatches::

    rank 0  0F0 0F1 2F0 2F1 0F2 . 2B0 -   0F3 2B1 -   2F2 0B0 -   2F3 0B1 -   . 2B2 -   . 2B3 - 0B2 - 0B3 -
    rank 1  .   1F0 1F1 3F0 3B0 - 3F1 3B1 -   1F2 1B0 -   1F3 1B1 -   3F2 3B2 - 3F3 3B3 - 1B2 - 1B3 - .   .

Rounds and the order within them: see `penstock.schedules.loop_common`.
"""

from __future__ import annotations

from penstock.schedules.loop_common import in_turn
from penstock.schedules.registry import Sizes


def rank_actions(sizes: Sizes, rank: int) -> list[int]:
    return in_turn(sizes, rank, per_hop=2)
