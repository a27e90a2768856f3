"""Forward only: inference and evaluation. With several stages a rank, microbatches go round in rounds.

Two ranks, two stages each, four microbatches::

    rank 0  0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3 .
    rank 1  .   1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3
"""

from __future__ import annotations

from penstock.plan.actions import forward
from penstock.schedules.loop_common import rounds, track
from penstock.schedules.registry import Sizes


def rank_actions(sizes: Sizes, rank: int) -> list[int]:
    return track(forward, sizes, rank, rounds(sizes))
