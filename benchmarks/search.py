"""What the search finds, against what is wanted: unit costs and two measured models, at little memory and at that of 1F1B.

Run: python benchmarks/search.py [--tries N] [--large]

Bubbles are shares of the makespan. `known` is the best of the schedules that penstock knows by name for the size and the
memory, those of papers and `zb-gis`. The costs of the models are those of arXiv 2401.10241, where a weight gradient holds less
than a forward. The floor is proved, so a gap of 0 means that nothing can be better. Seconds are CPU time. --large adds 32
ranks x 96 microbatches. Stages of unequal work come last, in times: what is shorter than the best fixed schedule, and what the
floor leaves at most. Exits with 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock.schedules import all_schedules
from penstock.search import search
from penstock.simulate import Costs, Link, Timeline, simulate

SECONDS, LARGE_SECONDS = 20.0, 60.0


@dataclass(frozen=True)
class Case:
    name: str
    ranks: int
    microbatches: int
    costs: Costs
    memory: float
    wanted: float
    seconds: float = SECONDS


def unit(ranks: int, stages_per_rank: int) -> Costs:
    return Costs.per_rank(num_stages=ranks * stages_per_rank, stages_per_rank=stages_per_rank)


def model(name: str, stages_per_rank: int) -> Costs:
    forward, back, weight, latency, hidden, heads = {
        "1.5B": (18.522, 18.086, 9.337, 0.601, 2304, 24),
        "6.2B": (29.718, 29.444, 19.927, 0.527, 4096, 32),
    }[name]
    return Costs.per_rank(
        num_stages=8 * stages_per_rank, stages_per_rank=stages_per_rank, forward=forward, backward_input=back,
        backward_weight=weight, latency=latency, held_to_weight=32 * hidden / (34 * hidden + 5 * heads * 1024),
    )  # fmt: skip


def slow_link(latency: float) -> Costs:
    """One delayed link, F = I = W = 10 (PipeMorph, NSDI 2026)."""
    costs = Costs.per_rank(num_stages=8, forward=10.0, backward_input=10.0, backward_weight=10.0)
    return replace(costs, links=(Link(6, 7, latency), Link(7, 6, latency)))


def fitting(case: Case) -> Iterator[Timeline]:
    """The known schedules that hold no more than the memory of the case."""
    per_rank = case.costs.num_stages // case.ranks
    for recipe in all_schedules():
        if recipe.stages_per_rank in (None, per_rank) and recipe.name != "forward":
            timeline = simulate(recipe(case.ranks, case.microbatches, stages_per_rank=per_rank), case.costs)
            if max(timeline.peak_memory) <= case.memory * (1 + 1e-9):
                yield timeline


def best_known(case: Case) -> str:
    """The smallest bubble of the known schedules that fit."""
    bubbles = [timeline.bubble_makespan for timeline in fitting(case)]
    return f"{min(bubbles):.4f}" if bubbles else "-"


def uneven(ranks: int, stages_per_rank: int) -> Costs:
    """The first stage has 0.6 and the last 1.5 of the work of the others; all hold the same."""
    count = ranks * stages_per_rank
    times = tuple(one / stages_per_rank for one in (0.6, *[1.0] * (count - 2), 1.5))
    held = (1 / stages_per_rank,) * count
    return replace(Costs.per_stage(times, times, times), held_to_input=held, held_to_weight=held)


def show_uneven(tries: int) -> int:
    """Uneven stages: at least 10 % shorter than the best fixed schedule of the same memory, where the floor allows that."""
    print("\nuneven stages                memory  fixed                            found   floor  shorter  at most")
    missed = 0
    for ranks, per_rank, microbatches, memory in ((8, 1, 24, 8.0), (8, 2, 24, 8.0), (8, 2, 24, 4.0), (8, 2, 16, 4.0)):
        case = Case("", ranks, microbatches, uneven(ranks, per_rank), memory, 0.0)
        fixed, name = min((timeline.makespan, timeline.plan.name) for timeline in fitting(case))
        found = search(ranks, microbatches, case.costs, memory_limit=memory, tries=tries)
        shorter, possible = 1 - found.makespan / fixed, 1 - found.floor / fixed
        bad = shorter < 0.1 <= possible or (possible < 0.1 and found.gap > 0.01)
        missed += bad
        print(
            f"{ranks} x {microbatches}, {per_rank} a rank{memory:18g}  {name:<22}{fixed:9.2f}{found.makespan:8.2f}"
            f"{found.floor:8.2f}{shorter:9.1%}{possible:9.1%}{'  MISSED' if bad else ''}",
            flush=True,
        )
    return missed


def cases(*, large: bool) -> list[Case]:
    sizes = [
        (8, 2, 24, 6.0, 0.0943),
        (8, 4, 24, 8.0, 0.0238),
        (8, 4, 24, 6.5, 0.050),
        (8, 4, 24, 5.75, 0.062),
        (8, 4, 24, 5.0, 0.070),
        (8, 4, 32, 5.0, 0.0634),
        (16, 4, 48, 10.0, 0.0857),
    ]
    found = [Case(f"unit {p} x {m}, {v} a rank", p, m, unit(p, v), memory, wanted) for p, v, m, memory, wanted in sizes]
    for name, memory, wanted in (
        ("1.5B", 8.0, 0.064),
        ("6.2B", 8.0, 0.046),
        ("1.5B", 6.0, 0.115),
        ("6.2B", 6.0, 0.100),
    ):
        found.append(Case(f"{name} 8 x 24, 4 a rank", 8, 24, model(name, 4), memory, wanted))
    for memory, wanted in ((5.0, 0.1906), (5.5, 0.1906), (6.0, 0.1906), (7.0, 0.1316), (8.0, 0.0728)):
        found.append(Case("1.5B 8 x 24, 2 a rank", 8, 24, model("1.5B", 2), memory, wanted))
    for latency in (10.0, 30.0, 60.0):
        at_most = 1 - 720 / (1.03 * (790 + latency))
        found.append(Case(f"slow link {latency:g}, 8 x 24", 8, 24, slow_link(latency), 16.0, at_most))
    if large:
        found.append(Case("unit 32 x 96, 1 a rank", 32, 96, unit(32, 1), 32.0, 0.0973, LARGE_SECONDS))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=1500)
    parser.add_argument("--large", action="store_true")
    given = parser.parse_args()
    missed = 0
    print(f"{'':27}memory    known  wanted   found   floor     gap  seconds")
    for case in cases(large=given.large):
        begin = time.process_time()
        found = search(case.ranks, case.microbatches, case.costs, memory_limit=case.memory, tries=given.tries)
        seconds = time.process_time() - begin
        bubble = found.timeline.bubble_makespan
        least = 1 - (1 - bubble) * found.makespan / found.floor
        bad = bubble > case.wanted + 5e-5 or seconds > case.seconds
        missed += bad
        print(
            f"{case.name:27}{case.memory:6g}{best_known(case):>9}{case.wanted:8.4f}{bubble:8.4f}{least:8.4f}{found.gap:8.2%}"
            f"{seconds:9.1f}{'  MISSED' if bad else ''}",
            flush=True,
        )
    missed += show_uneven(given.tries)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
