"""What stages cost, by the costs of their layers: times and bytes for one microbatch.

    costs = stage_costs(profile, [(0, 4), (4, 8)], Machine(), Placement.loop(2))
    with_budgets(costs, {0: (choice.budget_rows(0), 0.4)})     # stage 0 is compiled with a budget of memory

With a budget b, torch's partitioner keeps at most the inputs, the outputs and b of the rest of what a stage would keep. What it
then computes again is its own choice, the cheapest first. How long that takes is measured for some budgets of a stage
(`capture/layer_costs.py`); in between it grows evenly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
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
    # For each rank how many times as long as the others it takes; None: they are alike.
    ranks: tuple[float, ...] | None = None
    links: tuple[Link, ...] = ()  # between ranks that are further from one another than the others
    copy_bandwidth: float | None = None  # bytes a second off the device, and back; None: not measured


FREE: Final = Machine()
BudgetRows = list[tuple[float, float, float]]
"""Of a stage: budgets from 1 down, the bytes that each saves, and what the backward takes longer."""


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


def with_budgets(costs: Costs, budgets: Mapping[int, tuple[BudgetRows, float]]) -> Costs:
    """The costs of stages of which some are compiled with a budget: what is known of budgets for the stage, and this one.

    What is not kept is made again in the backward, all of it before the first of it is used up, at worst.
    """
    if not budgets:
        return costs
    held, added, longer = list(costs.held_to_input), [0.0] * costs.num_stages, [0.0] * costs.num_stages
    for stage, (rows, budget) in budgets.items():
        added[stage], longer[stage] = _saved(rows, budget, _room(costs, stage))
        held[stage] -= added[stage]

    def more(values: Sequence[float] | None, by: Sequence[float]) -> tuple[float, ...] | None:
        return None if values is None else tuple(map(sum, zip(values, by, strict=True)))

    return replace(
        costs,
        held_to_input=tuple(held),
        unmoved=None if costs.unmoved is None else tuple(map(min, costs.unmoved, held)),
        backward_input=more(costs.backward_input, longer) or (),
        backward=more(costs.backward, longer),
        forward_moment=more(costs.forward_moment, added),
        backward_moment=more(costs.backward_moment, added),
        input_moment=more(costs.input_moment, added),
    )


def _room(costs: Costs, stage: int) -> float:
    """What a stage keeps beside its inputs and outputs."""
    known = [sizes[stage] for sizes in (costs.kept_input, costs.output_bytes) if sizes is not None]
    return max(costs.held_to_input[stage] - sum(known), 0.0)


def _saved(rows: BudgetRows, budget: float, room: float) -> tuple[float, float]:
    """Bytes and time, of a stage that keeps `room` beside its inputs and outputs: a smaller budget saves no less.

    >>> _saved([(1.0, 0, 0.0), (0.5, 60, 2.0), (0.0, 100, 4.0)], 0.75, 100), _saved([(1.0, 0, 0.0), (0.5, 60, 2.0)], 0.5, 100)
    ((25.0, 1.0), (60, 2.0))
    """
    most = max((1 - budget) * room, *(size for one, size, _ in rows if one >= budget))
    for (high, _, before), (low, _, after) in pairwise(rows):
        if budget >= low:
            return min(most, room), before + (after - before) * (high - budget) / (high - low)
    return min(most, room), rows[-1][2]
