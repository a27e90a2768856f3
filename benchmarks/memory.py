"""What recomputing and offloading take and save: simulated, and measured on two processes.

Run: python benchmarks/memory.py [simulated] [gpipe] [1f1b]      all three unless some are named

Simulated: times are in forwards of one rank for one microbatch (F = I = W = 1), memory in activations of one rank for one
microbatch, as in the tables of the papers. A kept input is 1/16 of an activation, and a copy takes as long as the forward of its
stage.

Measured: transformer blocks of width 256, six on each of two ranks, 16 microbatches, GPipe and 1F1B: as they are, also in six
pieces of one block; recomputed by the plan (R), whole stages and in these pieces; and recomputed by hand with
torch.utils.checkpoint around the same stages and the same blocks; all in one run, with the same
blocks in the same memory, rounds taking turns, every other one in reverse. Memory is the most live bytes that a rank holds in a
step, beside parameters and gradients. Times are medians of the rounds, those of the slower rank. One step differs from the next
by some hundredths, so two ways are compared within each round, and the median of that counts. Targets go by the clock; beside
it stands the time of the processors, both ranks together. Exits with 1 when a target is missed. Takes three minutes for each
schedule.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.lower import divide, lower, offload, recompute
from penstock.plan import Plan, check
from penstock.schedules import get_schedule
from penstock.simulate import Costs, Timeline, simulate

RANKS, MICROBATCHES, STAGES_PER_RANK = 8, 24, 4
KEPT_INPUT = 1 / 16
WIDTH, HEADS, LENGTH = 256, 4, 64
ROWS, BLOCKS, MEASURED = 2, 6, 16  # rows of a microbatch, blocks of a rank, microbatches
ROUNDS = 15
SCHEDULES = ("gpipe", "1f1b")


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


class Blocks(nn.Module):
    """Transformer blocks; by hand all together ("stage") or each ("block") are run again from their input in the backward."""

    def __init__(self, blocks: list[nn.Module], by_hand: str = "") -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)
        self.by_hand = by_hand

    def forward(self, x: Tensor) -> Tensor:
        if self.by_hand == "stage":
            return checkpoint(self.blocks, x, use_reentrant=False)  # type: ignore[no-any-return]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.by_hand == "block" else block(x)
        return x


def block() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)


def ways(schedule: str) -> dict[str, tuple[Plan, str]]:
    """By name: the plan, and what is wrapped by hand."""
    plan = get_schedule(schedule)(2, MEASURED)
    pieces = divide(plan, BLOCKS)
    half = [stage for stage in range(pieces.num_stages) if stage % BLOCKS < BLOCKS // 2]
    return {
        "as it is": (plan, ""),
        "in pieces, no R": (pieces, ""),
        "R, half of the blocks": (recompute(pieces, half), ""),
        "R, each block": (recompute(pieces), ""),
        "by hand, each block": (plan, "block"),
        "R, each stage": (recompute(plan), ""),
        "by hand, each stage": (plan, "stage"),
    }


def measured(rank: int, port: int, schedules: list[str], found: Any) -> None:
    """One rank of all measurements."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    x = torch.randn(ROWS * MEASURED, LENGTH, WIDTH)
    # All ways use these: of two copies of the same weights, one may lie better in the caches than the other, for a whole run.
    blocks = [block() for _ in range(BLOCKS)]
    for schedule in schedules:
        runs = {}
        for name, (plan, by_hand) in ways(schedule).items():
            indices = plan.placement.stages_of(rank)
            each = BLOCKS // len(indices)
            stages = [
                penstock.PipelineStage(Blocks(blocks[k * each :][:each], by_hand), index, plan.num_stages, "cpu")
                for k, index in enumerate(indices)
            ]
            runs[name] = penstock.Schedule.from_plan(plan, stages, loss_fn=nn.functional.mse_loss)
        times: dict[str, list[float]] = {name: [] for name in runs}
        busy: dict[str, list[float]] = {name: [] for name in runs}
        peaks = {}
        for name, run in runs.items():
            run.step(x, target=x, return_outputs=False)
            with run.watch_memory() as memory:
                run.step(x, target=x, return_outputs=False)
            peaks[name] = memory.peak
        for turn in range(ROUNDS):
            for name in list(runs)[:: -1 if turn % 2 else 1]:
                run = runs[name]
                dist.barrier()
                start, began = time.perf_counter(), time.process_time()
                run.step(x, target=x, return_outputs=False)
                busy[name].append(time.process_time() - began)
                dist.barrier()
                times[name].append(time.perf_counter() - start)
        found.put((rank, schedule, times, peaks, busy))
    dist.barrier()
    dist.destroy_process_group()


def on_processes(schedules: list[str], targets: Targets) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    workers = [context.Process(target=measured, args=(rank, port, schedules, found)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for schedule in schedules:
        ranks: list[Any] = []
        while len(ranks) < 2:
            if not found.empty():
                ranks.append(found.get())
            elif any(worker.exitcode for worker in workers):
                sys.exit("a rank failed; what it raised stands above")
            else:
                time.sleep(0.1)
        report(schedule, ranks, targets)
    for worker in workers:
        worker.join(60)


def ratio(times: dict[str, list[float]], name: str, other: str) -> float:
    """How long one way takes in units of another: the median of the rounds."""
    return statistics.median(a / b for a, b in zip(times[name], times[other], strict=True))


def report(schedule: str, ranks: list[Any], targets: Targets) -> None:
    """A line for each way, and the targets: memory of the fullest rank, time of the slower."""
    # Of each way the time of each round.
    times = {name: [max(both) for both in zip(*(rank[2][name] for rank in ranks), strict=True)] for name in ranks[0][2]}
    busy = {name: [sum(both) for both in zip(*(rank[4][name] for rank in ranks), strict=True)] for name in times}
    peaks = {name: max(rank[3][name] for rank in ranks) for name in times}
    peak_of = peaks["as it is"]
    for name, taken in times.items():
        print(
            f"{schedule:<6} {name:<22} {1e3 * statistics.median(taken):8.1f} ms ({ratio(times, name, 'as it is'):.2f})   "
            f"processors {1e3 * statistics.median(busy[name]):8.1f} ms ({ratio(busy, name, 'as it is'):.2f})   "
            f"peak {peaks[name] / 2**20:6.1f} MiB ({peaks[name] / peak_of:.3f})"
        )
    share, longer = peaks["R, each block"] / peak_of, ratio(times, "R, each block", "as it is")
    targets.hold(f"{schedule}: R brings the peak to {share:.3f} of before (target 0.25)", share <= 0.25)
    targets.hold(f"{schedule}: R takes {longer:.2f} times as long (target 1.4)", longer <= 1.4)
    saved = (peak_of - peaks["R, half of the blocks"]) / (peak_of - peaks["R, each block"])
    # Both are in pieces, so they are weighed against the pieces as they are.
    some, every = (ratio(times, f"R, {what}", "in pieces, no R") - 1 for what in ("half of the blocks", "each block"))
    paid = some / every
    targets.hold(f"{schedule}: half of the stages save {saved:.2f} of it (target 0.4 to 0.6)", 0.4 <= saved <= 0.6)
    targets.hold(f"{schedule}: and cost {paid:.2f} of it, beside the pieces (target 0.4 to 0.6)", 0.4 <= paid <= 0.6)
    for what in ("each block", "each stage"):
        ours, by_hand = f"R, {what}", f"by hand, {what}"
        slower, processors, larger = (
            ratio(times, ours, by_hand),
            ratio(busy, ours, by_hand),
            peaks[ours] / peaks[by_hand],
        )
        text = f"of checkpoint by hand around {what} (target 1)"
        targets.hold(
            f"{schedule}: R takes {slower:.3f} of the time ({processors:.3f} of the processors') {text}", slower <= 1
        )
        targets.hold(f"{schedule}: R has {larger:.3f} of the peak {text}", larger <= 1)


def main() -> None:
    targets, wanted = Targets(), sys.argv[1:] or ["simulated", *SCHEDULES]
    if "simulated" in wanted:
        recomputed(targets)
        offloaded(targets)
    schedules = [schedule for schedule in SCHEDULES if schedule in wanted]
    if schedules:
        on_processes(schedules, targets)
    sys.exit(1 if targets.missed else 0)


if __name__ == "__main__":
    main()
