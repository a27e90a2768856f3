"""Looped breadth-first (arXiv 2211.05953): all microbatches through one stage, then all through the rank's next.

Two ranks, two stages each, four microbatches::

    rank 0  0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3 .   .   . 2B3 - 2B2 - 2B1 - 2B0 - 0B3 - 0B2 - 0B1 - 0B0 -
    rank 1  .   1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 3B3 - 3B2 - 3B1 - 3B0 - 1B3 - 1B2 - 1B1 - 1B0 - .   .

The backwards come in the reverse order of the forwards. A rank holds the activations of all microbatches, as in GPipe,
but the bubble is divided by the number of stages a rank, and each stage's parameters are gathered only twice a step.
"""

from __future__ import annotations

from itertools import chain

from penstock.plan.actions import backward, forward
from penstock.schedules.interleave_runs import run
from penstock.schedules.registry import Sizes


def rank_actions(sizes: Sizes, rank: int) -> list[int]:
    stages, count = range(rank, sizes.num_stages, sizes.num_ranks), sizes.num_microbatches
    forwards = (run(forward(stage, 0), count) for stage in stages)
    backwards = (reversed(run(backward(stage, 0), count)) for stage in reversed(stages))
    return [*chain.from_iterable(forwards), *chain.from_iterable(backwards)]
