"""The same question in whole numbers: exact sums, no rounding, so that ties are ties."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from operator import add, sub

from penstock.balance.profile import Profile


@dataclass(frozen=True)
class Problem:
    """A profile, a placement and the limits, ready for the solvers. Cut 0 is the front, cut num_layers the end.

    Times are whole multiples of 1/scale: every float is one, so nothing is rounded.
    """

    profile: Profile
    # Rank of each stage.
    ranks: tuple[int, ...]
    # Bytes for each rank; None: no limit.
    limits: tuple[int, ...] | None
    # For each stage: microbatches between F and I, and between I and W.
    in_flight: tuple[tuple[int, int], ...]
    # Bytes of parameter, gradient and optimizer state for each byte of parameter.
    state_factor: Fraction
    # For each stage: bytes in one unit of time to the rank of the next stage and to that of the one before; None: no limit,
    # or the same rank (the turn of a V).
    bandwidths: tuple[tuple[float | None, float | None], ...]
    # For each stage: what its time counts for, beside that of the others, as its rank is slower or faster.
    weights: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return len(self.profile.layers)

    @property
    def num_stages(self) -> int:
        return len(self.ranks)

    @property
    def num_ranks(self) -> int:
        return max(self.ranks) + 1

    @cached_property
    def rank_stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, in order."""
        return tuple(tuple(s for s, r in enumerate(self.ranks) if r == rank) for rank in range(self.num_ranks))

    @cached_property
    def _exact(self) -> tuple[list[int], dict[float, list[int]], int]:
        """The time of each layer; for each bandwidth that of what crosses each cut; and what they are multiples of."""
        times = [
            Fraction(layer.forward) + Fraction(layer.backward_input) + Fraction(layer.backward_weight)
            for layer in self.profile.layers
        ]
        wires = {
            bandwidth: [Fraction(0), *(Fraction(size / bandwidth) for size in self.profile.crossing), Fraction(0)]
            for bandwidth in {one for both in self.bandwidths for one in both if one is not None}
        }
        scale = math.lcm(*(value.denominator for values in (times, *wires.values()) for value in values))
        whole = {bandwidth: [int(value * scale) for value in values] for bandwidth, values in wires.items()}
        return [int(time * scale) for time in times], whole, scale

    @property
    def scale(self) -> int:
        return self._exact[2]

    @cached_property
    def prefix(self) -> list[int]:
        """prefix[c]: the time of all layers before cut c."""
        return [0, *accumulate(self._exact[0])]

    @cached_property
    def ceiling(self) -> int:
        """More than any stage or rank can cost, weighed."""
        wires = 2 * self.num_stages * max(map(max, self._exact[1].values()), default=0)
        return (self.prefix[-1] + wires + 1) * max(self.weights)

    @cached_property
    def _sums(self) -> dict[float | None, tuple[list[int], list[int]]]:
        """By bandwidth: the sums with what crosses the cut added to them, and taken off."""
        sums: dict[float | None, tuple[list[int], list[int]]] = {None: (self.prefix, self.prefix)}
        for bandwidth, wires in self._exact[1].items():
            sums[bandwidth] = list(map(add, self.prefix, wires)), list(map(sub, self.prefix, wires))
        return sums

    def ends(self, stage: int) -> list[int]:
        """With `starts`: the cost of layers a..b as this stage is ends[b] - starts[a]."""
        return self._sums[self.bandwidths[stage][0]][0]

    def starts(self, stage: int) -> list[int]:
        return self._sums[self.bandwidths[stage][1]][1]

    def cost(self, stage: int, start: int, stop: int) -> int:
        return self.ends(stage)[stop] - self.starts(stage)[start]

    @cached_property
    def _tie_bytes(self) -> list[int]:
        square_bits = (self.num_stages * self.ceiling * self.ceiling).bit_length()
        return [size << square_bits for size in (0, *self.profile.crossing, 0)]

    def tie_cut(self, cut_index: int) -> list[int]:
        """What the boundary before this stage adds to the tie-break: its bytes between ranks, above all sums of squares."""
        local = 0 < cut_index < self.num_stages and self.ranks[cut_index - 1] == self.ranks[cut_index]
        return [0] * (self.num_layers + 1) if local else self._tie_bytes

    @cached_property
    def layer_states(self) -> list[int]:
        return [math.ceil(layer.parameter_bytes * self.state_factor) for layer in self.profile.layers]

    @cached_property
    def group_states(self) -> dict[str, int]:
        return {name: math.ceil(size * self.state_factor) for name, size in self.profile.shared_parameters.items()}

    def layer_memory(self, in_flight: tuple[int, int]) -> list[int]:
        """Bytes of each layer in a stage that holds so many microbatches, parameters that are shared left out."""
        to_input, to_weight = in_flight
        return [
            state + to_input * layer.activation_to_input + to_weight * layer.activation_to_weight
            for state, layer in zip(self.layer_states, self.profile.layers, strict=True)
        ]

    @cached_property
    def memory_prefix(self) -> list[list[int]]:
        """For each stage: the sums of layer_memory before each cut."""
        sums = {held: [0, *accumulate(self.layer_memory(held))] for held in set(self.in_flight)}
        return [sums[held] for held in self.in_flight]

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
        """Whether every rank stays within its limit."""
        return all(self.rank_memory(rank, cuts) <= limit for rank, limit in enumerate(self.limits or ()))
