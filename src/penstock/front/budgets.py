"""Budgets of memory for compiled stages: what a stage keeps less with one, and what its backward takes longer.

    least_budget(choice, 0)                    # the smallest that was measured; None: none was
    with_budgets(costs, choice, {0: 0.4})      # the costs of stages that are compiled so

With a budget b, torch's partitioner keeps at most the inputs, the outputs and b of the rest of what a stage would keep. What it
then computes again is its own choice, the cheapest first. How long that takes is measured for some budgets of a stage
(`capture/layer_costs.py`); in between it grows evenly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from penstock.simulate import Costs

if TYPE_CHECKING:
    from penstock.front.choice import Choice

Rows = list[tuple[float, float, float]]
"""Of a stage: budgets from 1 down, the bytes that each saves, and what the backward takes longer."""


def least_budget(choice: Choice, stage: int) -> float | None:
    """The smallest that was measured and saved something."""
    rows = _rows(choice, stage)
    return rows[-1][0] if len(rows) > 1 else None


def with_budgets(costs: Costs, choice: Choice, budgets: Mapping[int, float]) -> Costs:
    """What is not kept is made again in the backward, all of it before the first of it is used up, at worst."""
    held, added, longer = list(costs.held_to_input), [0.0] * costs.num_stages, [0.0] * costs.num_stages
    for stage, budget in budgets.items():
        added[stage], longer[stage] = _saved(_rows(choice, stage), budget, _room(costs, stage))
        held[stage] -= added[stage]

    def more(values: Sequence[float] | None, by: Sequence[float]) -> tuple[float, ...] | None:
        return None if values is None else tuple(map(sum, zip(values, by, strict=True)))

    unmoved = None if costs.unmoved is None else tuple(map(min, zip(costs.unmoved, held, strict=True)))
    return replace(
        costs,
        held_to_input=tuple(held),
        unmoved=unmoved,
        backward_input=more(costs.backward_input, longer) or (),
        backward=more(costs.backward, longer),
        forward_moment=more(costs.forward_moment, added),
        backward_moment=more(costs.backward_moment, added),
        input_moment=more(costs.input_moment, added),
    )


def _room(costs: Costs, stage: int) -> float:
    """What a stage keeps beside its inputs and outputs."""
    inputs = 0.0 if costs.kept_input is None else costs.kept_input[stage]
    outputs = 0.0 if costs.output_bytes is None else costs.output_bytes[stage]
    return max(costs.held_to_input[stage] - inputs - outputs, 0.0)


def _rows(choice: Choice, stage: int) -> Rows:
    forward = choice.bare_costs.forward[stage]
    rows: Rows = [(1.0, 0.0, 0.0)]
    for budget, size, longer in choice.profile.metadata.get("budgets", {}).get(choice.key(stage), ()):
        if size > rows[-1][1]:
            rows.append((budget, size, max(longer * forward, rows[-1][2])))
    return rows


def _saved(rows: Rows, budget: float, room: float) -> tuple[float, float]:
    """Bytes and time, of a stage that keeps `room` beside its inputs and outputs: a smaller budget saves no less.

    >>> _saved([(1.0, 0, 0.0), (0.5, 60, 2.0), (0.0, 100, 4.0)], 0.75, 100), _saved([(1.0, 0, 0.0), (0.5, 60, 2.0)], 0.5, 100)
    ((25.0, 1.0), (60, 2.0))
    """
    most = max((1 - budget) * room, *(size for one, size, _ in rows if one >= budget))
    for (high, _, before), (low, _, after) in pairwise(rows):
        if budget >= low:
            return min(most, room), before + (after - before) * (high - budget) / (high - low)
    return min(most, room), rows[-1][2]
