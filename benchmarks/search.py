"""What the search finds, against what is wanted: unit costs and two measured models, at little memory and at that of 1F1B.

Run: python benchmarks/search.py [--tries N] [--large]

Bubbles are shares of the makespan. `published` is the best that papers have for the size and the memory: the generalised
interleaved schedules (PipeOffload, ICML 2025) for unit costs, ZBV and interleaved zero bubble for the two models (costs of
arXiv 2401.10241; a weight gradient holds less than a forward there). The floor is proved, so a gap of 0 means that nothing can be
better. Seconds are CPU time. --large adds 32 ranks x 96 microbatches. Exits with 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

from penstock.search import search
from penstock.simulate import Costs

SECONDS, LARGE_SECONDS = 20.0, 60.0


@dataclass(frozen=True)
class Case:
    name: str
    ranks: int
    microbatches: int
    costs: Costs
    memory: float
    published: float | None
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


def cases(*, large: bool) -> list[Case]:
    sizes = [
        (8, 2, 24, 6.0, 0.1111, 0.0943),
        (8, 4, 24, 8.0, 0.0464, 0.0238),
        (8, 4, 24, 6.5, 0.0649, 0.050),
        (8, 4, 24, 5.75, 0.0740, 0.062),
        (8, 4, 24, 5.0, 0.0828, 0.070),
        (8, 4, 32, 5.0, 0.0634, 0.0634),
        (16, 4, 48, 10.0, 0.0857, 0.0857),
    ]
    found = [
        Case(f"unit {p} x {m}, {v} a rank", p, m, unit(p, v), memory, published, wanted)
        for p, v, m, memory, published, wanted in sizes
    ]
    for name, memory, published, wanted in (
        ("1.5B", 8.0, 0.0668, 0.064), ("6.2B", 8.0, 0.0482, 0.046), ("1.5B", 6.0, 0.1348, 0.115), ("6.2B", 6.0, 0.1180, 0.100),
    ):  # fmt: skip
        found.append(Case(f"{name} 8 x 24, 4 a rank", 8, 24, model(name, 4), memory, published, wanted))
    for memory in (5.0, 5.5, 6.0, 7.0, 8.0):
        known = 0.1906 if memory < 7 else 0.1316 if memory < 8 else 0.0728
        found.append(Case("1.5B 8 x 24, 2 a rank", 8, 24, model("1.5B", 2), memory, known, known))
    if large:
        found.append(Case("unit 32 x 96, 1 a rank", 32, 96, unit(32, 1), 32.0, None, 1.0, LARGE_SECONDS))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=1500)
    parser.add_argument("--large", action="store_true")
    given = parser.parse_args()
    missed = 0
    print(f"{'':27}memory  published  wanted   found   floor     gap  seconds")
    for case in cases(large=given.large):
        begin = time.process_time()
        found = search(case.ranks, case.microbatches, case.costs, memory_limit=case.memory, tries=given.tries)
        seconds = time.process_time() - begin
        bubble = found.timeline.bubble_makespan
        least = 1 - (1 - bubble) * found.makespan / found.floor
        bad = bubble > case.wanted + 5e-5 or seconds > case.seconds
        missed += bad
        published = f"{case.published:.4f}" if case.published else "-"
        print(
            f"{case.name:27}{case.memory:6g}{published:>11}{case.wanted:8.4f}{bubble:8.4f}{least:8.4f}{found.gap:8.2%}"
            f"{seconds:9.1f}{'  MISSED' if bad else ''}",
            flush=True,
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
