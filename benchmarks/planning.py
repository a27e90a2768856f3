"""Planning, side by side with torch: building, lowering and checking plans, one rank's part of a huge one, simulating.

Run: python benchmarks/planning.py [--full]

Torch builds and lowers, and checks nothing that messages could get wrong; penstock builds, lowers and proves. With
--full torch also plans the largest size, which takes it minutes. Times are CPU times, the best of a few runs,
so that other programs on the machine do not count. Exits with 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace

from penstock.lower import lower, lower_rank
from penstock.plan import Plan, check
from penstock.schedules import get_schedule
from penstock.simulate import simulate

SCHEDULES = {"interleavedzerobubble": "ScheduleInterleavedZeroBubble", "zbv": "ScheduleZBVZeroBubble"}
SMALL, LARGE = (8, 64), (64, 1024)
BESIDE_TORCH = (SMALL, (16, 128), (32, 256))
STAGES_PER_RANK = 2

FASTER_THAN_TORCH = 50.0  # at the largest size
LINEAR = 1.5  # cost of an action at the largest size against the smallest
ONE_RANK_SECONDS = 2.0
SIMULATED_PER_SECOND = 400_000.0


def seconds(work: Callable[[], object], runs: int) -> float:
    """CPU seconds, the best of some runs."""
    best = float("inf")
    for _ in range(runs):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


def ours(name: str, num_ranks: int, num_microbatches: int) -> Plan:
    plan = lower(get_schedule(name)(num_ranks, num_microbatches, stages_per_rank=STAGES_PER_RANK))
    check(plan)
    return plan


def theirs(name: str, num_ranks: int, num_microbatches: int) -> object:
    import torch
    from torch.distributed.pipelining import schedules

    stage = SimpleNamespace(
        submod=torch.nn.Identity(),
        num_stages=num_ranks * STAGES_PER_RANK,
        group_size=num_ranks,
        group_rank=0,
        group=None,
        is_first=False,
        is_last=False,
        has_backward=True,
        stage_index_to_group_rank={},
    )
    return getattr(schedules, SCHEDULES[name])([stage] * STAGES_PER_RANK, num_microbatches)


class Targets:
    """What was to be reached, and whether it was."""

    def __init__(self) -> None:
        self.missed = 0

    def hold(self, text: str, reached: bool) -> None:
        self.missed += not reached
        print(f"  {'ok    ' if reached else 'MISSED'} {text}")


def whole_plans(name: str, targets: Targets, *, full: bool) -> None:
    theirs(name, 2, 4)  # import torch before the clock runs
    print(f"{name}, {STAGES_PER_RANK} stages a rank: penstock builds, lowers and checks; torch builds and lowers")
    per_action: dict[tuple[int, int], float] = {}
    for sizes in (*BESIDE_TORCH, LARGE):
        actions = ours(name, *sizes).num_actions
        mine = seconds(lambda sizes=sizes: ours(name, *sizes), runs=5 if sizes == SMALL else 3)  # type: ignore[misc]
        per_action[sizes] = mine / actions
        line = f"  {sizes[0]:>3} ranks x {sizes[1]:>4} microbatches, {actions:>7,} actions: penstock {mine:7.3f} s"
        line += f" ({per_action[sizes] * 1e6:.2f} us an action)"
        if sizes != LARGE or full:
            other = seconds(lambda sizes=sizes: theirs(name, *sizes), runs=1)  # type: ignore[misc]
            line += f", torch {other:8.3f} s ({other / actions * 1e6:.0f} us an action), {other / mine:.0f} x"
        print(line, flush=True)
        if sizes == LARGE and full:
            targets.hold(f"{other / mine:.0f} times faster than torch (target {FASTER_THAN_TORCH:.0f})",
                         other / mine >= FASTER_THAN_TORCH)  # fmt: skip
    growth = per_action[LARGE] / per_action[SMALL]
    targets.hold(f"an action costs {growth:.2f} x at the largest size (target {LINEAR})", growth <= LINEAR)


def one_rank(name: str, targets: Targets) -> None:
    recipe = get_schedule(name)

    def work(num_ranks: int) -> list[int]:
        return lower_rank(
            recipe, num_ranks // 2, num_ranks=num_ranks, num_microbatches=4096, stages_per_rank=STAGES_PER_RANK
        )

    def peak(num_ranks: int) -> float:
        tracemalloc.start()
        work(num_ranks)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most / 1e6

    print(f"{name}: one rank's lowered part of 1,024 ranks x 4,096 microbatches, {len(work(1024)):,} actions")
    taken = seconds(lambda: work(1024), runs=3)
    targets.hold(f"{taken:.3f} s (target {ONE_RANK_SECONDS})", taken <= ONE_RANK_SECONDS)
    few, many = peak(16), peak(1024)
    targets.hold(f"peak memory {many:.1f} MB; with 16 ranks {few:.1f} MB", many <= 1.25 * few + 1)


def simulating(name: str, targets: Targets) -> None:
    plan = ours(name, *LARGE)
    taken = seconds(lambda: simulate(plan), runs=3)
    rate = plan.num_actions / taken
    print(f"{name}: simulating {plan.num_actions:,} actions, {taken:.3f} s")
    targets.hold(f"{rate:,.0f} actions a second (target {SIMULATED_PER_SECOND:,.0f})", rate >= SIMULATED_PER_SECOND)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="torch plans 64 ranks x 1,024 microbatches, too: minutes")
    full = parser.parse_args().full
    targets = Targets()
    for name in SCHEDULES:
        whole_plans(name, targets, full=full)
        one_rank(name, targets)
        simulating(name, targets)
    sys.exit(1 if targets.missed else 0)


if __name__ == "__main__":
    main()
