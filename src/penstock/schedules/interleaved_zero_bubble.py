"""Interleaved zero bubble: interleaved 1F1B with split backwards; weight work fills what was idle at the end.

DRAW interleavedzerobubble 2 4 2

Half as many forwards ahead as in interleaved 1F1B, since the input backward alone is on the way back; rank r leaves r
weight backwards for later, so the ranks end together. Rounds: see `penstock.schedules.interleaved`.
"""

from __future__ import annotations

from penstock.plan.actions import backward_input, backward_weight
from penstock.schedules.interleaved import backwards, forwards, warmup
from penstock.schedules.registry import Sizes
from penstock.schedules.split import split_actions


def rank_actions(sizes: Sizes, rank: int) -> list[int]:
    return split_actions(
        forwards(sizes, rank),
        backwards(sizes, rank, kind=backward_input),
        backwards(sizes, rank, kind=backward_weight),
        ahead=warmup(sizes, rank, per_hop=1),
        owed=rank,
    )
