"""V-shaped schedules from a building block (arXiv 2405.15362, "Pipeline Parallelism with Controllable Memory").

A building block is the life of one microbatch, in slots of one action each: its two forwards and two input backwards on
every rank. It is repeated every six slots, the work of one rank for one microbatch, so a block is right when the four
slots of each rank differ modulo six; the two that are left take the weight backwards. How long the block keeps an
activation decides the memory: peak = life span / interval. The block of V-Half on three ranks::

    rank 0  0F .  .  .  .  .  .  .  5F 5I .  .  .  .  .  .  0I
    rank 1  .  .  1F .  .  .  .  4F .  .  .  4I .  .  .  1I .
    rank 2  .  .  .  .  2F .  3F .  .  .  .  .  .  3I 2I .  .

The slots are only an order: a rank starts an action as soon as it can.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.plan.actions import backward_input, backward_weight, forward
from penstock.schedules.registry import Sizes
from penstock.schedules.weave import repeat

INTERVAL = 6  # F, I and W of two stages


@dataclass(frozen=True)
class BuildingBlock:
    """Distances in slots along the path of a microbatch: down the V and up again, forward and backward."""

    forward_there: int  # from rank to rank, on the way from the first rank to the last
    turn: int  # on the last rank, from its first to its second stage
    forward_back: int  # from rank to rank, on the way back to the first
    loss: int  # on the first rank, from the last forward to the first backward
    backward_there: int  # from rank to rank, through the second stages, to the last rank
    turn_back: int  # on the last rank
    backward_back: int  # from rank to rank, through the first stages, to the first rank


def rank_actions(block: BuildingBlock, sizes: Sizes, rank: int) -> list[int]:
    """The actions of one rank in the order of their slots."""
    there, back = rank, sizes.num_stages - 1 - rank
    last, hops = sizes.num_ranks - 1, sizes.num_ranks - 1 - rank
    turned = block.forward_there * last + block.turn
    home = turned + block.forward_back * last + block.loss
    turned_back = home + block.backward_there * last + block.turn_back
    f0, f1 = block.forward_there * rank, turned + block.forward_back * hops
    i1, i0 = home + block.backward_there * rank, turned_back + block.backward_back * hops
    w0, w1 = _weight_slots((f0, f1, i1, i0), i0, i1)
    slots = [
        (f0, forward(there, 0)),
        (f1, forward(back, 0)),
        (i1, backward_input(back, 0)),
        (i0, backward_input(there, 0)),
        (w0, backward_weight(there, 0)),
        (w1, backward_weight(back, 0)),
    ]
    return repeat(slots, INTERVAL, sizes.num_microbatches)


def _weight_slots(taken: tuple[int, ...], i0: int, i1: int) -> tuple[int, int]:
    """The slots of the two weight backwards: as soon after their input backwards as the two free slots allow."""
    one, other = set(range(INTERVAL)) - {slot % INTERVAL for slot in taken}
    choices = [(_next(i0, a), _next(i1, b)) for a, b in ((one, other), (other, one))]
    return min(choices, key=lambda slots: (sum(slots), slots))


def _next(slot: int, phase: int) -> int:
    """The first slot after this one that has this phase."""
    return slot + 1 + (phase - slot - 1) % INTERVAL
