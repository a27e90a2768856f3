"""Common code of schedules over a loop of stages: the order of stages and microbatches, and taking turns.

A *round* is about as many microbatches as there are ranks. A rank takes a round through all of its stages before it
starts on the next one::

    two stages a rank, rounds of 3:  0F0 0F1 0F2  3F0 3F1 3F2  0F3 0F4 0F5  3F3 3F4 3F5

When the microbatches do not divide into rounds, the first rounds are larger by one: none is smaller than the number of
ranks (unless there are fewer microbatches than that in all), so a round that comes round finds its microbatches ready.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain, islice, pairwise

from penstock.plan.actions import backward, backward_input, backward_weight, forward
from penstock.schedules.interleave_runs import alternate, run
from penstock.schedules.registry import Sizes

Rounds = Sequence[tuple[int, int]]  # of each round: its first microbatch, and how many they are


def rounds(sizes: Sizes) -> Rounds:
    """Rounds of about as many microbatches as there are ranks."""
    count = max(1, sizes.num_microbatches // sizes.num_ranks)
    size, larger = divmod(sizes.num_microbatches, count)
    lengths = [size + (index < larger) for index in range(count)]
    return [*zip(accumulate(lengths, initial=0), lengths, strict=False)]


def track(kind: Callable[[int, int], int], sizes: Sizes, rank: int, taken: Rounds) -> list[int]:
    """All actions of one kind on a rank, round by round: forwards from its first stage on, backwards from its last."""
    stages = range(rank, sizes.num_stages, sizes.num_ranks)
    order = stages if kind is forward else stages[::-1]
    return [*chain.from_iterable(run(kind(stage, begin), length) for begin, length in taken for stage in order)]


def in_turn(
    sizes: Sizes, rank: int, taken: Rounds | None = None, *, per_hop: int = 1, owed: int | None = None
) -> list[int]:
    """Forwards ahead, then a forward and a backward in turn, then the backwards that are left.

    Ahead are the forwards of one round through all stages but the last, and `per_hop` for each hop to the last rank and back.
    Given `owed`, backwards are split, and the first `owed` input backwards are not followed by a W::

        ahead = 2, owed = 1:   F0 F1 | F2 I0 | F3 I1 W0 | I2 W1 | I3 W2 | W3
    """
    taken = rounds(sizes) if taken is None else taken
    kinds = (forward, backward) if owed is None else (forward, backward_input, backward_weight)
    forwards, backwards, *split = (track(kind, sizes, rank, taken) for kind in kinds)
    weights, total = chain.from_iterable(split), len(forwards)
    ahead = min((sizes.stages_per_rank - 1) * taken[0][1] + per_hop * (sizes.num_ranks - 1 - rank), total)
    steady, owed = total - ahead, total if owed is None else min(owed, total)
    actions = forwards[:ahead]
    for low, high in pairwise(sorted({0, steady, owed, total})):
        more = [forwards[ahead + low : ahead + high]] if low < steady else []
        late = [[*islice(weights, high - low)]] if low >= owed else []
        actions += alternate(*more, backwards[low:high], *late)
    return [*actions, *weights]
