"""Interleaved zero bubble: interleaved 1F1B with split backwards; weight work fills what was idle at the end.

Two ranks, two stages each, four microbatches::

    rank 0  0F0 0F1 2F0 2F1 .   2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3
    rank 1  .   1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3

Half as many forwards ahead as in interleaved 1F1B, since the input backward alone is on the way back; rank r leaves r
weight backwards for later, so the ranks end together. Rounds: see `penstock.schedules.loop_common`.
"""

from __future__ import annotations

from penstock.schedules.loop_common import in_turn
from penstock.schedules.registry import Sizes


def rank_actions(sizes: Sizes, rank: int) -> list[int]:
    return in_turn(sizes, rank, owed=rank)
