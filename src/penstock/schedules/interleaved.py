"""The order in which interleaved schedules take their stages and microbatches.

A *round* is about as many microbatches as there are ranks. A rank takes a round through all of its stages before it
starts on the next one::

    two stages a rank, rounds of 3:  0F0 0F1 0F2  3F0 3F1 3F2  0F3 0F4 0F5  3F3 3F4 3F5

When the microbatches do not divide into rounds, the first rounds are larger by one: none is smaller than the number of
ranks (unless there are fewer microbatches than that in all), so a round that comes round finds its microbatches ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from penstock.plan.actions import forward
from penstock.schedules.registry import Sizes
from penstock.schedules.weave import run


def rounds(sizes: Sizes) -> Iterator[tuple[int, int]]:
    """The first microbatch of each round and their number."""
    count = max(1, sizes.num_microbatches // sizes.num_ranks)
    size, larger = divmod(sizes.num_microbatches, count)
    begin = 0
    for index in range(count):
        length = size + (index < larger)
        yield begin, length
        begin += length


def forwards(sizes: Sizes, rank: int) -> list[int]:
    """All forwards of a rank, in order."""
    stages = range(rank, sizes.num_stages, sizes.num_ranks)
    actions: list[int] = []
    for begin, length in rounds(sizes):
        for stage in stages:
            actions += run(forward(stage, begin), length)
    return actions


def backwards(sizes: Sizes, rank: int, *, kind: Callable[[int, int], int]) -> list[int]:
    """All backwards of a rank, in order; `kind` packs one of them."""
    stages = range(rank, sizes.num_stages, sizes.num_ranks)
    actions: list[int] = []
    for begin, length in rounds(sizes):
        for stage in reversed(stages):
            actions += run(kind(stage, begin), length)
    return actions


def warmup(sizes: Sizes, rank: int, *, per_hop: int) -> int:
    """How many forwards a rank does before its first backward, the one that is paired with it not counted.

    One round through all stages but the last, and `per_hop` for each hop to the last rank and back.
    """
    _, length = next(rounds(sizes))
    wanted = (sizes.stages_per_rank - 1) * length + per_hop * (sizes.num_ranks - 1 - rank)
    return min(wanted, sizes.num_microbatches * sizes.stages_per_rank)
