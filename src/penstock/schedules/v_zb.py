"""V-ZB (arXiv 2405.15362): the V-shaped schedule with the memory of 1F1B, and no bubble at unit costs.

Two ranks, two stages each, four microbatches::

    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3 .
    rank 1  .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

Its building block (see `penstock.schedules.v_block`) has four slots between neighbours on the way to the last rank and
two on the way back, the same in forward and backward: a microbatch passes in twelve slots a rank, and the peak is
`num_ranks` microbatches. Repeated alone, the block leaves the warm-up and the drain half empty. Filled with forwards at
the start and with weight work at the end, it is the order of ZBV, slot for slot.
"""

from __future__ import annotations

from penstock.schedules import zbv
from penstock.schedules.registry import Sizes


def rank_actions(sizes: Sizes, rank: int) -> list[int]:
    return zbv.rank_actions(sizes, rank)
