"""A training step, side by side with torch.distributed.pipelining: two gloo ranks, one thread each.

    .venv/bin/python benchmarks/step.py                 # the table: medians of paired ratios of process CPU time
    .venv/bin/python benchmarks/step.py --calls         # functions called per forward or backward of a stage
    .venv/bin/python benchmarks/step.py --memory        # growth of memory with 256 microbatches of 1 MB

Both systems live in the same two processes and take turns, step by step, on copies of the same modules, so that noise
hits both alike. *limit* is the same modules' forward and backward in a plain loop, microbatch by microbatch, without any
messages: what no pipeline can go below. *captured* are the same stages cut out of one model by `penstock.pipeline`, and
*pipeline* is `penstock.Pipeline` over that model, cut at the same places: both should cost what stages made by hand cost.
`--systems penstock captured pipeline` leaves the others out.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

SCHEDULES = {
    "1F1B": ("Schedule1F1B", 1, "loop"),
    "interleaved 1F1B": ("ScheduleInterleaved1F1B", 2, "loop"),
    "zero bubble": ("ScheduleInterleavedZeroBubble", 2, "loop"),
    "ZBV": ("ScheduleZBVZeroBubble", 2, "v"),
}
SYSTEMS = ("penstock", "torch", "limit", "captured", "pipeline")


@dataclass(frozen=True)
class Workload:
    name: str
    layers: int
    microbatches: int
    shape: tuple[int, ...]  # of one microbatch

    def module(self) -> nn.Module:
        width = self.shape[-1]
        if len(self.shape) == 3:
            return nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        return nn.Linear(width, width)


WORKLOADS = {
    "small": Workload("8 linear layers of width 16, 32 microbatches", 8, 32, (4, 16)),
    "deep": Workload("64 linear layers of width 64, 16 microbatches", 64, 16, (4, 64)),
    "blocks": Workload("transformer blocks of width 256, sequence 128", 4, 8, (1, 128, 256)),
}


def stages_of(kind: str, rank: int, per_rank: int) -> list[int]:
    if kind == "v":
        return [rank, 3 - rank]
    return [rank + 2 * leg for leg in range(per_rank)]


def build(workload: Workload, schedule: str, rank: int, systems: list[str]) -> dict[str, Callable[[], None]]:
    """One step of each system on this rank, on copies of the same modules."""
    import torch.distributed.pipelining as theirs

    import penstock as ours

    name, per_rank, kind = SCHEDULES[schedule]
    num_stages = 2 * per_rank
    torch.manual_seed(0)
    layers = workload.layers // num_stages
    modules = [nn.Sequential(*(workload.module() for _ in range(layers))) for _ in range(num_stages)]
    mine = stages_of(kind, rank, per_rank)
    batch = torch.randn(workload.microbatches * workload.shape[0], *workload.shape[1:])
    target = torch.randn_like(batch)
    loss_fn = nn.MSELoss()
    args = (batch,) if 0 in mine else ()
    kwargs = {"target": target} if num_stages - 1 in mine else {}

    def by_hand(package: Any, stages: list[Any]) -> Callable[[], None]:
        given: Any = stages[0] if per_rank == 1 else stages
        runner = getattr(package, name)(given, workload.microbatches, loss_fn=loss_fn)
        return lambda: runner.step(*args, return_outputs=False, **kwargs)

    def made(package: Any) -> list[Any]:
        return [package.PipelineStage(copy.deepcopy(modules[i]), i, num_stages, torch.device("cpu")) for i in mine]

    model = copy.deepcopy(nn.Sequential(*modules))
    cuts = {str(i): ours.SplitPoint.BEGINNING for i in range(1, num_stages)}

    def captured() -> Callable[[], None]:
        pipe = ours.pipeline(model, (batch[: workload.shape[0]],), split_spec=cuts)
        return by_hand(ours, [pipe.build_stage(i, "cpu") for i in mine])

    def pipeline() -> Callable[[], None]:
        pipe = ours.Pipeline(
            model,
            (batch,),
            loss_fn=loss_fn,
            schedule=name.removeprefix("Schedule"),
            microbatches=workload.microbatches,
            split_spec=cuts,
            profile=False,
            share_loss=False,
        )
        return lambda: pipe.step(batch, target=target) and None

    plain = [copy.deepcopy(modules[i]) for i in mine]
    ways: dict[str, Callable[[], Callable[[], None]]] = {
        "penstock": lambda: by_hand(ours, made(ours)),
        "torch": lambda: by_hand(theirs, made(theirs)),
        "limit": lambda: lambda: _plain(plain, batch, target, workload.microbatches, loss_fn),
        "captured": captured,
        "pipeline": pipeline,
    }
    return {system: way() for system, way in ways.items() if system in systems}


def _plain(modules: list[nn.Module], batch: torch.Tensor, target: torch.Tensor, size: int, loss_fn: nn.Module) -> None:
    for x, y in zip(batch.chunk(size), target.chunk(size), strict=True):
        for module in modules:
            leaf = x.detach().requires_grad_()
            loss_fn(module(leaf), y).backward()


def measure(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {system: [] for system in steps}
    for number in range(rounds + 3):
        for system, step in steps.items():
            dist.barrier()
            start = time.process_time()
            step()
            if number >= 3:
                times[system].append(time.process_time() - start)
    return times


def count_calls(step: Callable[[], None]) -> int:
    count = 0

    def hook(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    step()
    dist.barrier()
    sys.setprofile(hook)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def worker(rank: int, store: str, options: argparse.Namespace, queue: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for key in options.workloads:
        workload = WORKLOADS[key]
        for schedule in options.schedules:
            steps = build(workload, schedule, rank, options.systems)
            for step in steps.values():
                step()
            if options.calls:
                actions = 2 * workload.microbatches * SCHEDULES[schedule][1]
                queue.put(
                    (rank, key, schedule, {system: count_calls(step) / actions for system, step in steps.items()})
                )
            else:
                queue.put((rank, key, schedule, measure(steps, options.rounds)))
            dist.barrier()
    dist.destroy_process_group()


def best_ratio(ours: list[float], theirs: list[float]) -> float:
    """The median of paired ratios over the least disturbed half of the rounds."""
    pairs = sorted(zip(ours, theirs, strict=True), key=lambda pair: pair[0] + pair[1])
    return statistics.median(a / b for a, b in pairs[: max(3, len(pairs) // 2)])


def memory_worker(rank: int, store: str, system: str, queue: Any) -> None:
    import resource

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    package = (
        __import__("penstock") if system == "penstock" else __import__("torch.distributed.pipelining", fromlist=["x"])
    )
    size, rows = 256, 256  # a microbatch of 256 x 1024 floats is 1 MB
    module = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh())
    stage = package.PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = package.Schedule1F1B(stage, size, loss_fn=nn.MSELoss())
    batch = torch.randn(size * rows, 1024)
    target = torch.randn(size * rows, 1024)
    idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    args, kwargs = ((batch,), {}) if rank == 0 else ((), {"target": target})
    for _ in range(2):
        schedule.step(*args, return_outputs=False, **kwargs)
    queue.put((rank, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - idle) / 1024))
    dist.destroy_process_group()


def spawn(function: Callable[..., None], *args: Any) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        queue = mp.get_context("spawn").SimpleQueue()
        processes = mp.spawn(function, args=(str(Path(folder) / "store"), *args, queue), nprocs=2, join=False)
        found = []
        while not processes.join(timeout=0.2):
            while not queue.empty():
                found.append(queue.get())
        while not queue.empty():
            found.append(queue.get())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--schedules", nargs="*", default=list(SCHEDULES), choices=list(SCHEDULES))
    parser.add_argument("--systems", nargs="*", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--calls", action="store_true")
    parser.add_argument("--memory", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.memory:
        for system in ("torch", "penstock"):
            growth = dict(spawn(memory_worker, system))
            print(
                f"{system:10} growth over the idle process: rank 0 {growth[0]:7.1f} MB, rank 1 {growth[1]:7.1f} MB",
                flush=True,
            )
        return
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _, key, schedule, result in spawn(worker, options):
        rows.setdefault((key, schedule), []).append(result)
    for (key, schedule), results in rows.items():
        print(f"{WORKLOADS[key].name:48} {schedule:18} {text_of(results, calls=options.calls)}", flush=True)


def text_of(results: list[dict[str, Any]], *, calls: bool) -> str:
    """One line of the table: calls, or the medians of paired ratios to torch (else to stages made by hand)."""
    base = "torch" if "torch" in results[0] else next(iter(results[0]))
    if calls:
        means = {system: statistics.mean(result[system] for result in results) for system in results[0]}
        found = "  ".join(f"{system} {value:7.1f}" for system, value in means.items())
        return f"calls: {found}  " + "  ".join(
            f"{system}/{other} {means[system] / means[other]:.2f}"
            for system, other in (("penstock", "torch"), ("captured", "penstock"), ("pipeline", "penstock"))
            if system in means and other in means
        )
    ratios = {
        system: statistics.mean(best_ratio(result[system], result[base]) for result in results)
        for system in results[0]
        if system != base
    }
    text = "  ".join(f"{system}/{base} {ratio:.2f}" for system, ratio in ratios.items())
    first = next(iter(results[0]))
    return f"{text}  ({first}: {1000 * statistics.median(results[0][first]):.1f} ms a step)"


if __name__ == "__main__":
    main()
