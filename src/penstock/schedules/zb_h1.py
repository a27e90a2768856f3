"""ZB-H1 (arXiv 2401.10241): 1F1B with split backwards, and no more memory than it: the bubble shrinks to a third.

DRAW zb-h1 3 5

Rank r leaves r weight backwards for later, when it would wait. The peak is `num_ranks` microbatches on every rank.
"""

from __future__ import annotations

from penstock.plan.actions import backward_input, backward_weight, forward
from penstock.schedules.registry import Sizes
from penstock.schedules.split import split_actions
from penstock.schedules.weave import run


def rank_actions(sizes: Sizes, rank: int) -> list[int]:
    count = sizes.num_microbatches
    return split_actions(
        [*run(forward(rank, 0), count)],
        [*run(backward_input(rank, 0), count)],
        [*run(backward_weight(rank, 0), count)],
        ahead=min(sizes.num_ranks - 1 - rank, count),
        owed=rank,
    )
