"""What stages cost, by the costs of their layers: times and bytes for one microbatch.

costs = stage_costs(profile, [(0, 4), (4, 8)], Machine(), Placement.loop(2))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.balance import Profile
from penstock.plan import Placement
from penstock.simulate import Costs, Link


@dataclass(frozen=True)
class Machine:
    """What ranks and connections cost beside the computing, in seconds. By default nothing."""

    latency: float = 0.0  # of a message between two ranks
    bandwidth: float | None = None  # bytes a second; None: no limit
    overhead: float = 0.0  # of each compute action
    posting: float = 0.0  # of each send or receive, for the rank that posts it
    around: float = 0.0  # of a step beside its actions: the batch cut, the ranks asked before and after
    ranks: tuple[float, ...] | None = (
        None  # for each how many times as long as the others it takes; None: they are alike
    )
    links: tuple[Link, ...] = ()  # between ranks that are further from one another than the others
    copy_bandwidth: float | None = None  # bytes a second off the device, and back; None: not measured


FREE: Final = Machine()


def stage_costs(profile: Profile, bounds: Sequence[tuple[int, int]], machine: Machine, placement: Placement) -> Costs:
    """The costs of stages that hold the layers from each first of the bounds to one before each second."""
    layers = profile.layers

    def total(name: str) -> tuple[float, ...]:
        return tuple(sum(getattr(layer, name) for layer in layers[start:stop]) for start, stop in bounds)

    full = profile.metadata.get("backward")
    crossing = (*profile.crossing, 0)
    kept = (*profile.metadata.get("crossing_kept", profile.crossing), 0)
    unsaved = (*profile.metadata.get("crossing_unsaved", [0] * len(profile.crossing)), 0)
    outputs = tuple(float(crossing[stop - 1]) for _, stop in bounds)
    # An output is held to its gradient, whether a graph keeps it or not. What comes from another rank is in a buffer of
    # this one; what comes from this one belongs to the stage that made it.
    beside = tuple(float(crossing[stop - 1] - kept[stop - 1]) for _, stop in bounds)
    ranks = placement.ranks
    inputs = tuple(
        outputs[stage - 1] if stage and ranks[stage - 1] != ranks[stage] else 0.0 for stage in range(len(bounds))
    )
    held = tuple(map(sum, zip(inputs, total("activation_to_input"), beside, strict=True)))
    unmoved = tuple(map(sum, zip(inputs, outputs, total("unmoved"), strict=True)))
    copied = [max(whole - stays, 0.0) for whole, stays in zip(held, unmoved, strict=True)]
    moments = list(zip(*(_moments(profile, start, stop) for start, stop in bounds), strict=True))
    return Costs(
        forward=total("forward"),
        backward_input=total("backward_input"),
        backward_weight=total("backward_weight"),
        held_to_input=held,
        held_to_weight=total("activation_to_weight"),
        kept_input=inputs,
        unsaved=tuple(float(unsaved[stop - 1]) for _, stop in bounds),
        casts=total("cast_bytes"),
        unmoved=unmoved,
        copy=None if machine.copy_bandwidth is None else tuple(size / machine.copy_bandwidth for size in copied),
        forward_moment=moments[0],
        backward_moment=moments[1],
        input_moment=moments[2],
        weight_moment=total("weight_peak"),  # all weights of a stage at once
        backward=None if full is None else tuple(sum(full[start:stop]) for start, stop in bounds),
        latency=machine.latency,
        bandwidth=machine.bandwidth,
        output_bytes=outputs,
        overhead=machine.overhead,
        posting=machine.posting,
        links=machine.links,
        ranks=machine.ranks,
    )


def _moments(profile: Profile, start: int, stop: int) -> tuple[float, float, float]:
    """Bytes beside those that a stage holds in the end: the most in its F, in its B and in its I.

    A forward has held what the layers before this one left. A backward has let go of what the layers after it had, but for
    what waits for the weight-backward, and brings the gradient of the output of this one.
    """
    layers, crossing = profile.layers, (*profile.crossing, 0)
    kept = (*profile.metadata.get("crossing_kept", profile.crossing), 0)
    whole = sum(layer.activation_to_input for layer in layers[start:stop]) + crossing[stop - 1] - kept[stop - 1]
    waiting = sum(layer.activation_to_weight for layer in layers[start:stop])
    before, forward, full, inputs = 0, 0, 0, 0
    for index in range(start, stop):
        layer = layers[index]
        given = crossing[index - 1] - kept[index - 1] if index > start else 0
        forward = max(forward, before + given + layer.forward_peak - whole)
        before += layer.activation_to_input
        waiting -= layer.activation_to_weight
        gradient = crossing[index] if index + 1 < stop else 0
        full = max(full, before + gradient + layer.backward_peak - whole)
        inputs = max(inputs, before + waiting + gradient + layer.input_peak - whole)
    return float(forward), float(full), float(inputs)
