"""Generalised interleaved schedules (PipeOffload, ICML 2025): the smaller the groups of microbatches, the less memory.

Three ranks, two stages each, groups of two, three microbatches; as published, weight work comes right after input work::

    rank 0  0F0 0F1 .   3F0 3F1 0F2 .   .   3I0 3W0 .   3I1 3W1 3F2 0I0 0W0 .   0I1 0W1 3I2 3W2 .   0I2 0W2
    rank 1  .   1F0 1F1 .   4F0 4F1 .   4I0 4W0 1F2 4I1 4W1 .   1I0 1W0 4F2 1I1 1W1 4I2 4W2 .   1I2 1W2 .
    rank 2  .   .   2F0 2F1 .   5F0 5I0 5W0 5F1 5I1 5W1 2F2 2I0 2W0 2I1 2W1 5F2 5I2 5W2 .   2I2 2W2 .   .

A group goes through all stages of a rank before the next group does, and its gradients come back in the same way. With v
stages a rank, rank r does `group * (v - 1) + num_ranks - r` forwards before its first backward, then one backward and one
forward in turn. So it holds `group * (v - 1) + num_ranks` activations of one stage at most. With groups as large as the
number of ranks that is the memory of 1F1B; groups half as large still keep all ranks busy, and need little more than half.

The later ranks hold less. Rank r may therefore leave r weight backwards for later, when it would wait, and holds no more than
the first one does. That is the schedule `zb-gis`, in which the ranks end together::

    rank 0  0F0 0F1 .   3F0 3F1 0F2 .   .   3I0 3W0 3I1 3W1 3F2 0I0 0W0 0I1 0W1 3I2 3W2 .   0I2 0W2
    rank 1  .   1F0 1F1 .   4F0 4F1 .   4I0 1F2 4I1 4W0 1I0 4W1 4F2 1I1 1W0 4I2 1W1 4W2 1I2 1W2 .
    rank 2  .   .   2F0 2F1 .   5F0 5I0 5F1 5I1 2F2 2I0 5W0 2I1 5W1 5F2 5I2 2W0 2W1 2I2 5W2 2W2 .
"""

from __future__ import annotations

from functools import partial

from penstock.plan.actions import below
from penstock.schedules.loop_common import in_turn
from penstock.schedules.registry import Recipe, Sizes


def recipe(group: int, *, zero_bubble: bool = False) -> Recipe:
    """The schedule with groups of this size, from half the number of ranks up.

    >>> recipe(5)(8, 24, stages_per_rank=4).name
    'gis-5'
    """
    name, title = ("zb-gis", "zero bubble, generalised") if zero_bubble else ("gis", "generalised")
    make = partial(rank_actions, group=group, zero_bubble=zero_bubble)
    return Recipe(f"{name}-{group}", f"{title} interleaved, groups of {group}", make, default_stages_per_rank=2)


def rank_actions(sizes: Sizes, rank: int, *, group: int | None = None, zero_bubble: bool = False) -> list[int]:
    """One rank's actions, with the smallest groups, and as published, unless told otherwise.

    The order is made for whole groups; microbatches that are not there are left out of it.
    """
    group = -(-sizes.num_ranks // 2) if group is None else group
    taken = [(begin, group) for begin in range(0, sizes.num_microbatches, group)]
    actions = in_turn(sizes, rank, taken, owed=rank if zero_bubble else 0)
    return actions if sizes.num_microbatches % group == 0 else below(sizes.num_microbatches, actions)


def zero_bubble_actions(sizes: Sizes, rank: int) -> list[int]:
    """The smallest groups, weight work where the rank would wait."""
    return rank_actions(sizes, rank, zero_bubble=True)
