"""Interleaved 1F1B (arXiv 2104.04473): 1F1B over several stages a rank, in rounds; the bubble shrinks with the stages.

DRAW interleaved1f1b 2 4 2

Rounds and the order within them: see `penstock.schedules.interleaved`.
"""

from __future__ import annotations

from penstock.plan.actions import backward
from penstock.schedules.interleaved import backwards, forwards, warmup
from penstock.schedules.registry import Sizes
from penstock.schedules.weave import alternate


def rank_actions(sizes: Sizes, rank: int) -> list[int]:
    ahead = warmup(sizes, rank, per_hop=2)
    first, second = forwards(sizes, rank), backwards(sizes, rank, kind=backward)
    steady = len(first) - ahead
    return [*first[:ahead], *alternate(first[ahead:], second[:steady]), *second[steady:]]
