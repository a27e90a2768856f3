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

from collections.abc import Sequence

from penstock.plan.actions import backward_input, backward_weight, forward
from penstock.schedules.interleave_runs import repeat
from penstock.schedules.registry import Sizes

INTERVAL = 6  # F, I and W of two stages


def rank_actions(hops: Sequence[int], turns: Sequence[int], sizes: Sizes, rank: int) -> list[int]:
    """The actions of one rank in the order of their slots.

    A microbatch goes along the ranks four times: there and back with its forwards, there and back with its input backwards.
    `hops` are the slots from rank to rank on each of these ways; `turns` those between one way and the next: on the last
    rank, on the first rank (the loss), and on the last rank again.
    """
    last, begin, slots = sizes.num_ranks - 1, 0, list[int]()
    for way, (hop, turn) in enumerate(zip(hops, (*turns, 0), strict=True)):
        slots.append(begin + hop * (last - rank if way % 2 else rank))
        begin += hop * last + turn
    there, back = rank, sizes.num_stages - 1 - rank
    actions = [forward(there, 0), forward(back, 0), backward_input(back, 0), backward_input(there, 0)]
    slots += _weight_slots(slots)
    actions += [backward_weight(there, 0), backward_weight(back, 0)]
    return repeat(zip(slots, actions, strict=True), INTERVAL, sizes.num_microbatches)


def _weight_slots(taken: Sequence[int]) -> tuple[int, int]:
    """The slots of the two weight backwards: as soon after their input backwards as the two free slots allow."""
    *_, input_back, input_there = taken
    one, other = set(range(INTERVAL)) - {slot % INTERVAL for slot in taken}
    choices = [(_next(input_there, a), _next(input_back, b)) for a, b in ((one, other), (other, one))]
    return min(choices, key=lambda slots: (sum(slots), slots))


def _next(slot: int, phase: int) -> int:
    """The first slot after this one that has this phase."""
    return slot + 1 + (phase - slot - 1) % INTERVAL
