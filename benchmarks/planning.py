"""Planning, side by side with torch: building, lowering and checking plans, one rank's part of a huge one, simulating.

Run: python benchmarks/planning.py [--full]

Torch builds and lowers, and checks nothing that messages could get wrong; penstock builds, lowers and proves. What a rank
binds before its first step is measured for every named schedule, and the command `penstock plan` with its start-up.
With --full torch also plans the largest size, which takes it minutes. Times are CPU times, the best of a few runs,
so that other programs on the machine do not count. Exits with 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from types import SimpleNamespace

from penstock.lower import lower, lower_shares
from penstock.plan import Plan, check
from penstock.schedules import all_schedules, get_schedule
from penstock.simulate import simulate

SCHEDULES = {"interleavedzerobubble": "ScheduleInterleavedZeroBubble", "zbv": "ScheduleZBVZeroBubble"}
SMALL, LARGE = (8, 64), (64, 1024)
BESIDE_TORCH = (SMALL, (16, 128), (32, 256))
STAGES_PER_RANK = 2

FASTER_THAN_TORCH = 50.0  # at the largest size
LINEAR = 1.5  # cost of an action at the largest size against the smallest
ONE_RANK_SECONDS = 2.0
BIND_SECONDS, BIND_MEGABYTES = 1.0, 200.0  # one rank of HUGE, its messages bound to what does them
HUGE = (1024, 4096)
COMMAND_FASTER_THAN_TORCH = 8.0  # start-up included
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

    def work(num_ranks: int) -> Sequence[int]:
        plan = recipe(num_ranks, 4096, stages_per_rank=STAGES_PER_RANK)
        return lower_shares(plan).codes[num_ranks // 2]

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


def bound_share(name: str) -> tuple[int, float, float]:
    """One rank binds what it will run: how many actions, CPU seconds, and the peak of what was allocated in megabytes."""
    import torch

    from penstock.comm import LocalWorld
    from penstock.run import Schedule
    from penstock.stage.pipeline_stage import PipelineStage

    transport, device = LocalWorld(HUGE[0]).transports[HUGE[0] // 2], torch.device("cpu")

    def bind() -> int:
        plan = get_schedule(name)(*HUGE)
        stages = [
            PipelineStage(torch.nn.Linear(2, 2), k, plan.num_stages, device, group=transport)
            for k in plan.placement.stages_of(transport.rank)
        ]
        schedule = Schedule.from_plan(plan, stages, loss_fn=torch.nn.functional.mse_loss)
        return len(schedule.lowered_plan(forward_only=not plan.has_backward).codes[transport.rank])

    taken = seconds(bind, runs=2)
    tracemalloc.start()
    actions = bind()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return actions, taken, most / 1e6


def shares(targets: Targets) -> None:
    print(f"one rank binds its share of {HUGE[0]:,} ranks x {HUGE[1]:,} microbatches")
    for recipe in all_schedules():
        actions, taken, most = bound_share(recipe.name)
        targets.hold(
            f"{recipe.name:<22} {actions:>7,} actions: {taken:.3f} s (target {BIND_SECONDS}), "
            f"{most:.0f} MB (target {BIND_MEGABYTES:.0f})",
            taken <= BIND_SECONDS and most <= BIND_MEGABYTES,
        )


def command(targets: Targets) -> None:
    """The whole plan as a file: what the command takes, from its start to its end."""
    name, (num_ranks, num_microbatches) = "interleavedzerobubble", BESIDE_TORCH[-1]
    other = seconds(lambda: theirs(name, num_ranks, num_microbatches), runs=1)
    with tempfile.TemporaryDirectory() as folder:
        words = f"plan {name} -p {num_ranks} -m {num_microbatches} -v {STAGES_PER_RANK} --lowered --quiet -o {folder}/plan.csv"
        taken = []
        for _ in range(3):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, "-m", "penstock", *words.split()], check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    print(
        f"penstock {words.replace(folder + '/', '')}: {min(taken):.3f} s with its start-up, torch {other:.3f} s without"
    )
    ratio = other / min(taken)
    targets.hold(f"{ratio:.1f} times as fast (target {COMMAND_FASTER_THAN_TORCH})", ratio >= COMMAND_FASTER_THAN_TORCH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="torch plans 64 ranks x 1,024 microbatches, too: minutes")
    full = parser.parse_args().full
    targets = Targets()
    for name in SCHEDULES:
        whole_plans(name, targets, full=full)
        one_rank(name, targets)
        simulating(name, targets)
    shares(targets)
    command(targets)
    sys.exit(1 if targets.missed else 0)


if __name__ == "__main__":
    main()
