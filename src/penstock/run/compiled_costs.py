"""What compiled stages hold, for the memory of a plan: known exactly once they have run, since their graphs say it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.plan import Placement
from penstock.run.binding import TRAIN
from penstock.run.schedule import Schedule
from penstock.simulate import Costs


def compiled_costs(schedule: Schedule, costs: Costs) -> Costs:
    """The costs with what compiled stages hold to their I and to their W, in bytes, as found in a step. All ranks call it.

        schedule.step(batch, target=labels)
        simulate(schedule.plan, compiled_costs(schedule, costs)).peak_memory

    A stage that is eager, or compiled in several graphs, keeps the numbers that it had; so do all before the first step.
    """
    if not schedule._programs.compile_ahead:  # which all ranks know
        return costs
    mine = [[index, *held] for index, held in kept_by_graphs(schedule).items()]
    everyone = schedule._programs.get(TRAIN).transport.collectives.all_gather("what compiled stages hold", mine)
    kept = {index: (one, two) for held in everyone for index, one, two in held}
    return with_kept(costs, kept, schedule.plan.placement)


def kept_by_graphs(schedule: Schedule) -> dict[int, tuple[int, int]]:
    """By stage of this rank: bytes to its I and to its W, where its graph is known and has run."""
    runs = schedule._programs.get(TRAIN).runs
    found = {index: run.compiled.held() for index, run in runs.items() if run.compiled is not None}
    return {index: held for index, held in found.items() if held is not None}


def with_kept(costs: Costs, kept: Mapping[int, tuple[int, int]], placement: Placement) -> Costs:
    """The costs with what some stages are known to hold. What a stage of the same rank gave is that one's."""
    to_input, to_weight, ranks = list(costs.held_to_input), list(costs.held_to_weight), placement.ranks
    for index, (held_to_input, held_to_weight) in kept.items():
        near = index > 0 and ranks[index - 1] == ranks[index]
        given = costs.output_bytes[index - 1] if near and costs.output_bytes is not None else 0.0
        to_input[index], to_weight[index] = max(held_to_input - given, 0.0), float(held_to_weight)
    return replace(costs, held_to_input=tuple(to_input), held_to_weight=tuple(to_weight))
