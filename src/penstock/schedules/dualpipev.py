"""DualPipeV (arXiv 2412.19437, folded in half): a forward and a backward in one slot hide one another's messages.

Two ranks, two stages each, four microbatches::

    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3 3B1  -)  .  (3F2 0B0 -) 3B2  -   .  (3F3 0B1 -)  3B3 - 0I2 0W2 0I3 0W3
    rank 1  .   1F0 2F0 1F1 2F1 1F2 2B0 -    (2F2 1B0 -) (1F3 2B1 -) (2F3 1B1 -) 2B2  -   1B2 -   . 2I3 1I3 2W3 1W3

Brackets hold the two halves of an overlapped pair, such as `(0F3;3B1)OVERLAP_F_B`: one slot where the two are fused,
drawn here in series. The full pattern needs `2 * num_ranks` microbatches; with fewer, those that are missing are left
out of it, and a pair that lost one half becomes a plain action.
"""

from __future__ import annotations

from typing import Final

from penstock.plan.action_positions import STEP
from penstock.plan.actions import backward, backward_input, backward_weight, below, forward, overlap
from penstock.schedules.interleave_runs import alternate, run, weave
from penstock.schedules.registry import Sizes

PAIR_STEP: Final = overlap(STEP, STEP) - overlap(0, 0)  # from a packed pair to that of the next microbatches


def rank_actions(sizes: Sizes, rank: int) -> list[int]:
    num_ranks, wanted = sizes.num_ranks, sizes.num_microbatches
    count = max(wanted, 2 * num_ranks)
    there, back = rank, sizes.num_stages - 1 - rank
    hops = num_ranks - 1 - rank  # to the last rank
    filled = 2 * hops + rank + 1  # forwards of the first stage before the steady phase
    steady = count - filled

    actions = [*run(forward(there, 0), 2 * hops)]
    actions += weave(rank + 1, forward(there, 2 * hops), forward(back, 0))
    actions += weave(hops, backward_input(back, 0), backward_weight(back, 0), forward(back, rank + 1))
    outward = _pairs(steady, forward(there, filled), backward(back, hops))
    homeward = _pairs(steady + hops, forward(back, num_ranks), backward(there, 0))
    start = len(actions)
    actions += alternate(outward, homeward[:steady])
    if hops == 0:  # the last rank has nothing to hide yet: its first pair stays two actions
        actions[start : start + 1] = [forward(there, filled), backward(back, hops)]
    actions += alternate(run(backward(back, hops + steady), hops), homeward[steady:])
    actions += _drain((there, back), rank, hops, count=count)
    return actions if wanted == count else below(wanted, actions)


def _pairs(count: int, first: int, second: int) -> range:
    """Overlapped pairs over neighbouring microbatches."""
    pair = overlap(first, second)
    return range(pair, pair + count * PAIR_STEP, PAIR_STEP)


def _drain(stages: tuple[int, int], rank: int, hops: int, *, count: int) -> list[int]:
    """No forward is left. The second half of the backwards is split, and its weight work fills the end."""
    there, back = stages
    next1 = count - rank - 1
    next0 = next1 - hops
    whole = weave(rank + 1, backward(back, next1), backward(there, next0))
    inputs = weave(rank + 1, backward_input(back, next1), backward_input(there, next0))
    weights = weave(rank + 1, backward_weight(back, next1), backward_weight(there, next0))[rank + 1 :]
    weights += run(backward_weight(there, next0 + rank + 1), hops)
    actions = whole[: rank + 1] + inputs[rank + 1 :]
    actions += alternate(weights[:hops], run(backward_input(there, next0 + rank + 1), hops))
    return actions + weights[hops:]
