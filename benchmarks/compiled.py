"""Compiled stages: what their split backward costs, and what zero bubble costs with them; two gloo ranks, one thread each.

    .venv/bin/python benchmarks/compiled.py                      # inductor; two workloads, seven programs a workload
    .venv/bin/python benchmarks/compiled.py --backend aot_eager
    .venv/bin/python benchmarks/compiled.py --first-step         # how long the first step takes, an empty cache for each rank
    .venv/bin/python benchmarks/compiled.py --first-step --shared-cache     # the same with one empty cache for both
    .venv/bin/python benchmarks/compiled.py --first-step --compile-threads 2     # inductor's own choice on two cores

The programs of a workload live in the same two processes and take turns, step by step, so that noise hits all alike: compiled
stages under 1F1B, interleaved 1F1B, ZB-H1, interleaved zero bubble and ZBV, eager ones under ZB-H1 and zero bubble. 1F1B and
ZB-H1 have one stage on each rank; the others have two, and so twice the calls and three times (ZBV: twice) the messages, so
each is held against the 1F1B that has its number of stages, and against plain 1F1B as well. What a second stage on each rank
costs without any pipeline is the *loop*: the same compiled modules in a plain loop, forward and backward, no messages. Compared
is the processor time of both ranks together, since ZBV has the loss on another rank than 1F1B. Wanted: at most 1.05 of compiled
1F1B, and on small layers at most 0.9 of eager zero bubble; (F + I + W) / (F + B) at most 1.05. The first step, in which all
ranks compile at the same time, at most 0.6 of one in which they compile one after the other, each for itself, as on two
machines. With one cache for both, the stage that is compiled second finds there what is equal in the first, so less is left to
be gained; and with more than one compile thread a rank, two ranks on two cores share what one has for itself alone.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from step import SCHEDULES, Workload, measure, spawn, stages_of
from torch import nn

WORKLOADS = {
    "small": Workload("64 linear layers of width 64, 16 microbatches", 64, 16, (4, 64)),
    "blocks": Workload("transformer blocks of width 256, sequence 128", 4, 8, (1, 128, 256)),
}
ROUNDS = 20
KINDS = {**SCHEDULES, "ZB-H1": ("ScheduleZBH1", 1, SCHEDULES["1F1B"][2])}
FIRST = Workload("transformer blocks of width 64, sequence 32", 2, 4, (1, 32, 64))
PROGRAMS = {
    "1F1B": ("1F1B", True),
    "interleaved 1F1B": ("interleaved 1F1B", True),
    "ZB-H1": ("ZB-H1", True),
    "zero bubble": ("zero bubble", True),
    "ZBV": ("ZBV", True),
    "eager ZB-H1": ("ZB-H1", False),
    "eager zero bubble": ("zero bubble", False),
}
LOOPS = {"a loop of one": 1, "a loop of two": 2}  # how many compiled modules share the layers of a rank
# Each zero-bubble program, the 1F1B with as many stages on each rank, and the same (or next to it) with eager stages.
COMPARED = {
    "ZB-H1": ("1F1B", "eager ZB-H1"),
    "zero bubble": ("interleaved 1F1B", "eager zero bubble"),
    "ZBV": ("interleaved 1F1B", "eager zero bubble"),
}


def build(
    workload: Workload, backend: str, rank: int, programs: dict[str, tuple[str, bool]] = PROGRAMS
) -> dict[str, Callable[[], None]]:
    """One step of each program on this rank, on copies of the same layers."""
    import penstock

    torch.manual_seed(0)
    layers = [workload.module() for _ in range(workload.layers)]
    batch = torch.randn(workload.microbatches * workload.shape[0], *workload.shape[1:])
    target = torch.randn_like(batch)
    found: dict[str, Callable[[], None]] = {}
    for program, (schedule, compiled) in programs.items():
        name, per_rank, kind = KINDS[schedule]
        num_stages = 2 * per_rank
        size = len(layers) // num_stages
        mine = stages_of(kind, rank, per_rank)
        modules = [nn.Sequential(*copy.deepcopy(layers[i * size : (i + 1) * size])) for i in mine]
        if compiled:
            modules = [torch.compile(module, backend=backend) for module in modules]  # type: ignore[misc]
        stages = [
            penstock.PipelineStage(module, i, num_stages, torch.device("cpu"))
            for i, module in zip(mine, modules, strict=True)
        ]
        given: Any = stages[0] if per_rank == 1 else stages
        runner = getattr(penstock, name)(given, workload.microbatches, loss_fn=nn.MSELoss())
        args = (batch,) if 0 in mine else ()
        kwargs = {"target": target} if num_stages - 1 in mine else {}
        found[program] = partial(runner.step, *args, return_outputs=False, **kwargs)
    return found


def build_loops(workload: Workload, backend: str) -> dict[str, Callable[[], None]]:
    """One step of one and of two compiled modules without a pipeline, with as many layers together as a rank has."""
    batch = torch.randn(workload.microbatches * workload.shape[0], *workload.shape[1:])
    target = torch.randn_like(batch)

    def loop(modules: list[Any]) -> None:
        for x, y in zip(batch.chunk(workload.microbatches), target.chunk(workload.microbatches), strict=True):
            calls = []
            for module in modules:
                leaf = x.detach().requires_grad_()
                x = module(leaf)
                calls.append((leaf, x))
            grad = x.detach() - y
            for leaf, output in reversed(calls):
                output.backward(grad)
                grad = leaf.grad

    found: dict[str, Callable[[], None]] = {}
    for name, count in LOOPS.items():
        size = workload.layers // 2 // count
        parts = [nn.Sequential(*(workload.module() for _ in range(size))) for _ in range(count)]
        found[name] = partial(loop, [torch.compile(part, backend=backend) for part in parts])
    return found


def worker(rank: int, store: str, options: argparse.Namespace, queue: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch._dynamo.config.recompile_limit = 64  # one process holds the code of several programs
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for key in options.workloads:
        steps = build(WORKLOADS[key], options.backend, rank) | build_loops(WORKLOADS[key], options.backend)
        queue.put((rank, key, measure(steps, options.rounds or ROUNDS)))
        dist.barrier()
    dist.destroy_process_group()


def first_step_worker(rank: int, store: str, options: argparse.Namespace, ahead: bool, cache: str, queue: Any) -> None:
    """The seconds of the first step, in a process that has compiled nothing, with a cache that holds nothing."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache if options.shared_cache else f"{cache}/{rank}"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(options.compile_threads)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    importlib.import_module("torch._inductor.compile_fx")  # not a part of what is measured

    from penstock.run.ahead import CompileAhead

    if not ahead:  # each rank compiles when its first activation comes, and again when its first gradient does
        CompileAhead.open = lambda self: None  # type: ignore[method-assign]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    step = build(FIRST, options.backend, rank, {"1F1B": PROGRAMS["1F1B"]})["1F1B"]
    dist.barrier()
    began = time.perf_counter()
    step()
    dist.barrier()
    queue.put((rank, time.perf_counter() - began))
    dist.destroy_process_group()


def first_step(options: argparse.Namespace) -> None:
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(options.rounds or 2):
        for ahead in (False, True) if number % 2 else (True, False):  # whoever is first finds the compiler cold
            with tempfile.TemporaryDirectory() as cache:
                times[ahead].append(max(seconds for _, seconds in spawn(first_step_worker, options, ahead, cache)))
            print(f"{'at the same time' if ahead else 'one after the other'}: {times[ahead][-1]:.1f} s", flush=True)
    apart, together = statistics.median(times[False]), statistics.median(times[True])
    caches = "one empty cache for both" if options.shared_cache else "an empty cache for each rank"
    print(
        f"first step, {caches}: {apart:.1f} s one after the other, {together:.1f} s at the same time, {together / apart:.2f}; "
        f"all: {[[round(t, 1) for t in pair] for pair in zip(times[False], times[True], strict=True)]}",
        flush=True,
    )


def paired(ours: list[float], theirs: list[float]) -> float:
    """The median of paired ratios over the least disturbed half of the rounds."""
    pairs = sorted(zip(ours, theirs, strict=True), key=sum)
    return statistics.median(a / b for a, b in pairs[: max(3, len(pairs) // 2)])


def one_stage(workload: Workload, backend: str, rounds: int) -> float:
    """(F + I + W) / (F + B) of one compiled stage, without messages."""
    from penstock.backward.compile_stage import CompiledStage
    from penstock.stage.backward import Deferral, backward_input, backward_weight, run_deferred

    torch.manual_seed(0)
    module = nn.Sequential(*(workload.module() for _ in range(workload.layers // 4)))
    compiled = torch.compile(module, backend=backend)
    x = torch.randn(*workload.shape)
    grad = torch.ones_like(x)
    deferral = Deferral(compiled)  # type: ignore[arg-type]
    stage = CompiledStage(compiled, deferral)  # type: ignore[arg-type]

    def whole() -> None:
        leaf = x.detach().requires_grad_()
        compiled(leaf).backward(grad)

    def split() -> None:
        leaf = x.detach().requires_grad_()
        with stage.running(split=True):
            output, pending = run_deferred(deferral, compiled, (leaf,), {})
        backward_input([output], [grad], pending, inputs=[leaf])
        backward_weight(pending)

    times: dict[str, list[float]] = {"whole": [], "split": []}
    for number in range(rounds * 4):
        for name, run in (("whole", whole), ("split", split)):
            start = time.process_time()
            for _ in range(20):
                run()
            if number >= 3:
                times[name].append(time.process_time() - start)
    return paired(times["split"], times["whole"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=0, help=f"0: {ROUNDS} of steps, 2 of first steps")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--first-step", action="store_true")
    parser.add_argument("--shared-cache", action="store_true", help="of both ranks, in --first-step")
    parser.add_argument("--compile-threads", type=int, default=1, help="of inductor on each rank, in --first-step")
    options = parser.parse_args()
    if options.first_step:
        first_step(options)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    for key in options.workloads:
        ratio = one_stage(WORKLOADS[key], options.backend, options.rounds or ROUNDS)
        print(f"{WORKLOADS[key].name:48} one stage: (F + I + W) / (F + B) = {ratio:.2f}", flush=True)
    rows: dict[str, list[dict[str, list[float]]]] = {}
    for _, key, times in spawn(worker, options):
        rows.setdefault(key, []).append(times)
    for key, results in rows.items():
        both = {
            name: [sum(times) for times in zip(*(rank[name] for rank in results), strict=True)]
            for name in (*PROGRAMS, *LOOPS)
        }
        one, two = (both[name] for name in LOOPS)
        print(
            f"{WORKLOADS[key].name:48} two compiled modules / one, without a pipeline {paired(two, one):.2f}",
            flush=True,
        )
        for program, (alike, eager) in COMPARED.items():
            ratios = {name: paired(both[program], both[name]) for name in dict.fromkeys((alike, "1F1B", eager))}
            text = "  ".join(f"/ {name} {ratio:.2f}" for name, ratio in ratios.items())
            print(f"{WORKLOADS[key].name:48} {program:11} {text}", flush=True)


if __name__ == "__main__":
    main()
