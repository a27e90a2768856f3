"""What recomputing and offloading take and save, simulated.

Run: python benchmarks/memory.py

Times are in forwards of one rank for one microbatch (F = I = W = 1), memory in activations of one rank for one microbatch,
as in the tables of the papers. A kept input is 1/16 of an activation, and a copy takes as long as the forward of its
stage. Exits with 1 when a target is missed.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from penstock.lower import lower, offload, recompute
from penstock.plan import Plan, check
from penstock.schedules import get_schedule
from penstock.simulate import Costs, Timeline, simulate

RANKS, MICROBATCHES, STAGES_PER_RANK = 8, 24, 4
KEPT_INPUT = 1 / 16


class Targets:
    """What was to be reached, and whether it was."""

    def __init__(self) -> None:
        self.missed = 0

    def hold(self, text: str, reached: bool) -> None:
        print(f"  {'reached' if reached else 'MISSED '}  {text}", flush=True)
        self.missed += not reached


def timed(plan: Plan, costs: Costs) -> Timeline:
    """Proved with its messages, then timed."""
    check(lower(plan))
    return simulate(plan, costs)


def line(name: str, timeline: Timeline) -> None:
    print(
        f"{name:<44} makespan {timeline.makespan:7.2f}   bubble {timeline.bubble_makespan:5.1%}   "
        f"peak {max(timeline.peak_memory):5.2f}"
    )


def recomputed(targets: Targets) -> None:
    plan = get_schedule("1f1b")(RANKS, MICROBATCHES)
    even = replace(Costs.unit(plan), kept_input=(KEPT_INPUT,) * RANKS)
    heavy = (1.0,) * (RANKS - 1) + (2.0,)
    kinds = {
        "even stages": even,
        "a message takes half a forward": replace(even, latency=0.5),
        "the last stage takes twice as long": replace(even, forward=heavy, backward_input=heavy, backward_weight=heavy),
    }
    for name, costs in kinds.items():
        before, after = simulate(plan, costs), timed(recompute(plan, costs=costs), costs)
        line(f"1f1b, {name}", before)
        line("  all stages recomputed", after)
        naive = before.makespan + MICROBATCHES * costs.forward[0]
        share = after.makespan / naive
        targets.hold(f"{share:.3f} of 1F1B + {MICROBATCHES} F (target 1)", share <= 1)
        if costs is not even:
            targets.hold(f"gaps take some: {share:.3f} of it (target 0.9)", share <= 0.9)
        inputs = (RANKS - 1) * KEPT_INPUT
        held = max(after.peak_memory)
        targets.hold(f"peak {held:.3f}, one activation and inputs {1 + inputs:.3f}", held <= 1 + inputs + 1e-9)
    half = range(RANKS // 2)
    after = timed(recompute(plan, half, costs=even), even)
    line("1f1b, the first half of the stages recomputed", after)


def offloaded(targets: Targets) -> None:
    most = max(simulate(get_schedule("1f1b")(RANKS, MICROBATCHES)).peak_memory)
    for name in ("gis", "zb-gis"):
        plan = get_schedule(name)(RANKS, MICROBATCHES, stages_per_rank=STAGES_PER_RANK)
        costs = replace(Costs.unit(plan), kept_input=(KEPT_INPUT / STAGES_PER_RANK,) * plan.num_stages)
        first_half = range(plan.num_stages // 2)  # of every rank the two stages whose activations live longest
        line(f"{name}, groups of {RANKS // 2}, {STAGES_PER_RANK} stages a rank", simulate(plan, costs))
        after = timed(offload(plan, first_half, costs=costs), costs)
        line("  half of the stages offloaded", after)
        if name == "gis":
            held = max(after.peak_memory) / most
            targets.hold(f"peak {held:.3f} of 1F1B's (target below 1/3)", held < 1 / 3)
            targets.hold(f"bubble {after.bubble_makespan:.3f} (target below 0.1)", after.bubble_makespan < 0.1)
        line("  the other half recomputed", timed(recompute(after.plan, costs=costs), costs))
        line("  all stages offloaded", timed(offload(plan, costs=costs), costs))


def main() -> None:
    targets = Targets()
    recomputed(targets)
    offloaded(targets)
    sys.exit(1 if targets.missed else 0)


if __name__ == "__main__":
    main()
