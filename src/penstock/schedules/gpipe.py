"""GPipe (arXiv 1811.06965): all forwards, then all backwards.

Three ranks, four microbatches::

    rank 0  F0 F1 F2 F3 .  .  .  . .  . B0 - B1 - B2 - B3 -
    rank 1  .  F0 F1 F2 F3 .  .  . B0 - B1 - B2 - B3 - .  .
    rank 2  .  .  F0 F1 F2 F3 B0 - B1 - B2 - B3 - .  . .  .

A rank holds the activations of all microbatches.
"""

from __future__ import annotations

from penstock.plan.actions import backward, forward
from penstock.schedules.interleave_runs import run
from penstock.schedules.registry import Sizes


def rank_actions(sizes: Sizes, rank: int) -> list[int]:
    num_microbatches = sizes.num_microbatches
    return [*run(forward(rank, 0), num_microbatches), *run(backward(rank, 0), num_microbatches)]
