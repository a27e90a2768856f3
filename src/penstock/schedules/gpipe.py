"""GPipe (arXiv 1811.06965): all forwards, then all backwards.

DRAW gpipe 3 4

A rank holds the activations of all microbatches.
"""

from __future__ import annotations

from penstock.plan.actions import backward, forward
from penstock.schedules.registry import Sizes
from penstock.schedules.weave import run


def rank_actions(sizes: Sizes, rank: int) -> list[int]:
    num_microbatches = sizes.num_microbatches
    return [*run(forward(rank, 0), num_microbatches), *run(backward(rank, 0), num_microbatches)]
