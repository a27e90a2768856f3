"""Forward only: inference and evaluation. With several stages a rank, microbatches go round in rounds.

DRAW forward 3 3 2
"""

from __future__ import annotations

from penstock.schedules.interleaved import forwards
from penstock.schedules.registry import Sizes


def rank_actions(sizes: Sizes, rank: int) -> list[int]:
    return forwards(sizes, rank)
