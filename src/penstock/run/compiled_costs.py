"""What compiled stages hold, for the memory of a plan: known exactly once they have run, since their graphs say it."""

from __future__ import annotations

import json
from dataclasses import replace

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
    program = schedule._programs[TRAIN]
    mine = {index: run.compiled.held() for index, run in program.runs.items() if run.compiled is not None}
    known = [[index, *held] for index, held in mine.items() if held is not None]
    to_input, to_weight = list(costs.held_to_input), list(costs.held_to_weight)
    for post in program.transport.gather("what compiled stages hold", json.dumps(known).encode()):
        for index, held_to_input, held_to_weight in json.loads(post):
            to_input[index], to_weight[index] = float(held_to_input), float(held_to_weight)
    return replace(costs, held_to_input=tuple(to_input), held_to_weight=tuple(to_weight))
