"""The same question in whole numbers: exact sums, no rounding, so that ties are ties."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from fractions import Fraction
from itertools import accumulate
from operator import add, sub

from penstock.balance.layer_profile import Profile


class Problem:
    """A profile, a placement and the limits, ready for the solvers. Cut 0 is the front, cut num_layers the end.

    Times are whole multiples of 1/scale: every float is one, so nothing is rounded. Nobody changes one that is made.
    """

    def __init__(
        self,
        profile: Profile,
        ranks: tuple[int, ...],
        # Bytes for each rank; None: no limit.
        limits: tuple[int, ...] | None,
        *,
        # For each stage: microbatches between F and I, and between I and W.
        in_flight: tuple[tuple[int, int], ...],
        # Bytes of parameter, gradient and optimizer state for each byte of parameter.
        state_factor: Fraction,
        # For each stage: bytes in one unit of time to the rank of the next stage and to that of the one before; None: no limit,
        # or the same rank (the turn of a V).
        bandwidths: tuple[tuple[float | None, float | None], ...],
        # For each stage: what its time counts for, beside that of the others, as its rank is slower or faster.
        weights: tuple[int, ...],
    ) -> None:
        self.profile, self.ranks, self.limits, self.in_flight = profile, ranks, limits, in_flight
        self.bandwidths, self.weights, layers = bandwidths, weights, profile.layers
        self.num_layers, self.num_stages, self.num_ranks = len(layers), len(ranks), max(ranks) + 1
        # The stages of each rank, in order.
        self.rank_stages = [tuple(s for s, r in enumerate(ranks) if r == rank) for rank in range(self.num_ranks)]
        times = [
            Fraction(layer.forward) + Fraction(layer.backward_input) + Fraction(layer.backward_weight)
            for layer in layers
        ]
        wires = {
            bandwidth: [Fraction(0), *(Fraction(size / bandwidth) for size in profile.crossing), Fraction(0)]
            for bandwidth in {one for both in bandwidths for one in both if one is not None}
        }
        self.scale = math.lcm(*(value.denominator for values in (times, *wires.values()) for value in values))
        # prefix[c]: the time of all layers before cut c.
        prefix = self.prefix = [0, *accumulate(int(time * self.scale) for time in times)]
        # By bandwidth: the sums with what crosses the cut added to them, and taken off.
        self._sums: dict[float | None, tuple[list[int], list[int]]] = {None: (prefix, prefix)}
        slowest = 0
        for bandwidth, values in wires.items():
            whole = [int(value * self.scale) for value in values]
            self._sums[bandwidth] = list(map(add, prefix, whole)), list(map(sub, prefix, whole))
            slowest = max(slowest, *whole)
        # More than any stage or rank can cost, weighed.
        self.ceiling = (prefix[-1] + 2 * self.num_stages * slowest + 1) * max(weights)
        square_bits = (self.num_stages * self.ceiling * self.ceiling).bit_length()
        self._tie_bytes = [size << square_bits for size in (0, *profile.crossing, 0)]
        self._layer_states = [math.ceil(layer.parameter_bytes * state_factor) for layer in layers]
        self.group_states = {name: math.ceil(size * state_factor) for name, size in profile.shared_parameters.items()}
        # For each stage: the sums of layer_memory before each cut.
        sums = {held: [0, *accumulate(self.layer_memory(held))] for held in set(in_flight)}
        self.memory_prefix = [sums[held] for held in in_flight]

    def within(self, limits: tuple[int, ...]) -> Problem:
        """The same problem under other limits; what was worked out for this one holds for it too."""
        other = copy(self)
        other.limits = limits
        return other

    def ends(self, stage: int) -> list[int]:
        """With `starts`: the cost of layers a..b as this stage is ends[b] - starts[a]."""
        return self._sums[self.bandwidths[stage][0]][0]

    def starts(self, stage: int) -> list[int]:
        return self._sums[self.bandwidths[stage][1]][1]

    def cost(self, stage: int, start: int, stop: int) -> int:
        return self.ends(stage)[stop] - self.starts(stage)[start]

    def tie_cut(self, cut_index: int) -> list[int]:
        """Return the term of a boundary in the tie-break: its bytes between ranks, which outweigh all sums of squares."""
        local = 0 < cut_index < self.num_stages and self.ranks[cut_index - 1] == self.ranks[cut_index]
        return [0] * (self.num_layers + 1) if local else self._tie_bytes

    def layer_memory(self, in_flight: tuple[int, int]) -> list[int]:
        """Bytes of each layer in a stage that holds so many microbatches, parameters that are shared left out."""
        to_input, to_weight = in_flight
        return [
            state + to_input * layer.activation_to_input + to_weight * layer.activation_to_weight
            for state, layer in zip(self._layer_states, self.profile.layers, strict=True)
        ]

    def groups(self, start: int, stop: int) -> frozenset[str]:
        """Shared parameters that the layers start..stop use."""
        return frozenset().union(*(layer.shared for layer in self.profile.layers[start:stop]))

    def group_memory(self, groups: frozenset[str]) -> int:
        return sum(self.group_states[name] for name in groups)

    def stage_memory(self, stage: int, start: int, stop: int) -> int:
        prefix = self.memory_prefix[stage]
        return prefix[stop] - prefix[start] + self.group_memory(self.groups(start, stop))

    def rank_memory(self, rank: int, cuts: Sequence[int]) -> int:
        """Bytes of a rank; what several of its stages share is counted once."""
        spans = [(self.memory_prefix[stage], cuts[stage], cuts[stage + 1]) for stage in self.rank_stages[rank]]
        used = frozenset[str]().union(*(self.groups(start, stop) for _, start, stop in spans))
        return sum(prefix[stop] - prefix[start] for prefix, start, stop in spans) + self.group_memory(used)

    def fits(self, cuts: Sequence[int]) -> bool:
        """Return True if every rank stays within its memory limit."""
        return all(self.rank_memory(rank, cuts) <= limit for rank, limit in enumerate(self.limits or ()))
