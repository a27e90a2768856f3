"""ZBV (arXiv 2401.10241, section 6): two stages a rank, there and back; no bubble at unit costs with 1F1B's memory.

Two ranks, two stages each, four microbatches::

    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3 .
    rank 1  .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

The first rank holds the first and the last stage, so a microbatch comes home quickly and every rank can fill its
warm-up and its cool-down. The full pattern needs `2 * num_ranks - 1` microbatches; with fewer, those that are missing
are left out of it, and nothing else changes.

V-ZB of arXiv 2405.15362 is the same order: its building block (see `penstock.schedules.v_block`), repeated, with the
warm-up filled with forwards and the drain with weight work.
"""

from __future__ import annotations

from penstock.plan.action_positions import STEP
from penstock.plan.actions import backward_input, backward_weight, below, forward
from penstock.schedules.interleave_runs import run, weave
from penstock.schedules.registry import Sizes


def rank_actions(sizes: Sizes, rank: int) -> list[int]:
    num_ranks, wanted = sizes.num_ranks, sizes.num_microbatches
    count = max(wanted, 2 * num_ranks - 1)
    there, back = rank, sizes.num_stages - 1 - rank
    f0, i0, w0 = forward(there, 0), backward_input(there, 0), backward_weight(there, 0)
    f1, i1, w1 = forward(back, 0), backward_input(back, 0), backward_weight(back, 0)

    ahead = 2 * (num_ranks - rank) - 1  # forwards until the first microbatch comes back
    near = num_ranks - rank  # backwards of the second stage until the first gradient of the first stage comes back
    filled = ahead + rank  # forwards of the first stage before the steady phase
    full = count - filled  # steady rounds with a forward of the first stage
    steady = count - num_ranks  # all steady rounds
    actions = [*run(f0, ahead)]
    actions += weave(rank, f1, f0 + ahead * STEP)
    actions += weave(near, f1 + rank * STEP, i1, w1)
    actions += weave(full, f0 + filled * STEP, i0, w0, f1 + num_ranks * STEP, i1 + near * STEP, w1 + near * STEP)
    rest, rest1 = full * STEP, (near + full) * STEP
    actions += weave(steady - full, i0 + rest, w0 + rest, f1 + (num_ranks + full) * STEP, i1 + rest1, w1 + rest1)
    done, done1 = steady * STEP, (near + steady) * STEP
    actions += weave(rank, i0 + done, i1 + done1)
    actions += weave(near, i0 + done + rank * STEP, w0 + done)
    actions += run(w1 + done1, rank)
    actions += run(w0 + done + near * STEP, rank)
    return actions if wanted == count else below(wanted, actions)
