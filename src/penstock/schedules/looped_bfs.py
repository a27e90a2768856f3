"""Looped breadth-first (arXiv 2211.05953): all microbatches through one stage, then all through the rank's next.

DRAW loopedbfs 2 4 2

The backwards come in the reverse order of the forwards. A rank holds the activations of all microbatches, as in GPipe,
but the bubble is divided by the number of stages a rank, and each stage's parameters are gathered only twice a step.
"""

from __future__ import annotations

from penstock.plan.actions import backward, forward
from penstock.schedules.registry import Sizes
from penstock.schedules.weave import run


def rank_actions(sizes: Sizes, rank: int) -> list[int]:
    stages = range(rank, sizes.num_stages, sizes.num_ranks)
    actions: list[int] = []
    for stage in stages:
        actions += run(forward(stage, 0), sizes.num_microbatches)
    for stage in reversed(stages):
        actions += reversed(run(backward(stage, 0), sizes.num_microbatches))
    return actions
