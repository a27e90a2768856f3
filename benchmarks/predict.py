"""Predicted against measured step times: two gloo ranks, one thread each, on a processor of its own.

    .venv/bin/python benchmarks/predict.py                     # four models, four schedules
    .venv/bin/python benchmarks/predict.py --models gpt --rounds 3

For each model and schedule a Pipeline is made, which predicts the step from layers that all ranks measure at the same time
(*by layers*). Then it is calibrated by some steps, which predicts the next one; and again, until 20 steps were measured: one and
the same step takes up to half as long again from one second to the next on a small machine, whatever is predicted, so both sides
are taken in turns. *calibrated* is the median of the predictions, *measured* that of the 20 steps. They may differ by 10 %. Exits
with 1 where they do. *first* is the first prediction, made before all 20 steps, over what these took.

Three more figures say what was off where it does. *again* are 20 more steps, each right after one of the 20, over these: the same
work under the same conditions, to which no prediction can be nearer than the steps are to themselves. *others* is the share of
the processors that other programs had meanwhile: the machine is quiet if that is next to nothing. *same steps* are some steps as
predicted from their own costs, over what they took: how good a prediction is if nothing changes between measuring and running.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

SCHEDULES = ("1f1b", "interleaved1f1b", "interleavedzerobubble", "zbv")
MODELS = ("gpt", "llama", "bert", "mixtral")
RANKS, MICROBATCHES, STEPS = 2, 8, 20
WITHIN = 0.10


def model_of(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any, Any]:
    """A model, its arguments for a batch of 16, a target and a loss. Those of tests/models, with more rows."""
    torch.manual_seed(0)
    if name == "gpt":
        from penstock.train.gpt import GPT, next_byte_loss, size_of

        size = size_of("small")
        tokens = torch.randint(0, 256, (16, size.length))
        return GPT(size), (tokens,), {}, tokens, next_byte_loss
    from tests.models.models import MODELS as KNOWN

    entry = next(entry for entry in KNOWN if entry.name == name)
    kwargs = {
        key: torch.cat([value] * 8) if isinstance(value, torch.Tensor) else value
        for key, value in entry.example().items()
    }
    return entry.make().to(entry.dtype), (), kwargs, None, None


def processors_busy() -> float:
    """Seconds in which the processors of this machine were at work, since it was started; Linux only."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK")


def same_steps(pipe: Any, step: Any) -> float:
    """Some steps as predicted from their own costs, over what they took."""
    from penstock.simulate import measured_costs, simulate
    from penstock.simulate.fit_costs import undisturbed

    timelines = []
    for _ in range(8):
        dist.barrier()
        with pipe.record() as recording:
            step()
        pipe.zero_grad()
        timelines.append(recording.timeline)
    costs = measured_costs(timelines, pipe.choice.costs)
    taken = statistics.fmean(timeline.makespan for timeline in undisturbed(timelines))
    return (simulate(timelines[0].plan, costs).makespan + costs.uneven) / taken


def rank_main(rank: int, meeting: str, models: list[str], schedules: list[str], rounds: int, out: str) -> None:
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        mine = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {mine[rank % len(mine)]})  # a rank that is moved about takes longer, now and then
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    from penstock import Pipeline

    rows = []
    for name in models:
        for schedule in schedules:
            for _ in range(rounds):
                model, args, kwargs, target, loss_fn = model_of(name)
                pipe = Pipeline(
                    model, args, example_kwargs=kwargs, example_target=target, loss_fn=loss_fn, schedule=schedule,
                    microbatches=MICROBATCHES,
                )  # fmt: skip
                assert pipe.choice is not None
                before = pipe.choice.predicted
                step = partial(pipe.step, *args, target=target, **kwargs)
                predicted: list[float] = []
                taken: tuple[list[float], list[float]] = ([], [])
                first, busy, spent = time.perf_counter(), processors_busy(), time.process_time()
                for _ in range(STEPS):
                    predicted.append(pipe.calibrate(*args, target=target, rounds=4, **kwargs).predicted)
                    for steps in taken:
                        dist.barrier()
                        began = time.perf_counter()
                        step()
                        steps.append(time.perf_counter() - began)
                        pipe.zero_grad()
                ours = sum(pipe.ranks.all_gather("own processor time", time.process_time() - spent))
                others = (processors_busy() - busy - ours) / ((time.perf_counter() - first) * (os.cpu_count() or 1))
                measured, again = (max(pipe.ranks.all_gather("seconds", statistics.median(steps))) for steps in taken)
                row = Row(name, schedule, before, predicted, measured, again, max(others, 0.0), same_steps(pipe, step))
                rows.append(row)
                if rank == 0:
                    print(row, flush=True)
    if rank == 0:
        Path(out).write_text(str(sum(not row.holds for row in rows)))
    dist.destroy_process_group()


class Row(NamedTuple):
    """One line of the table; times in seconds."""

    model: str
    schedule: str
    by_layers: float
    predicted: list[float]
    measured: float
    again: float
    others: float
    same_steps: float

    @property
    def calibrated(self) -> float:
        return statistics.median(self.predicted)

    @property
    def holds(self) -> bool:
        return abs(self.calibrated / self.measured - 1) <= WITHIN

    def __str__(self) -> str:
        cells = [f"{1e3 * one:7.2f} ms ({one / self.measured:.2f})" for one in (self.by_layers, self.calibrated)]
        return (
            f"{self.model:<8} {self.schedule:<22} by layers {cells[0]}  calibrated {cells[1]}  measured "
            f"{1e3 * self.measured:7.2f} ms  first {self.predicted[0] / self.measured:.2f}  "
            f"again {self.again / self.measured:.2f}  others {self.others:4.0%}  "
            f"same steps {self.same_steps:.2f}  {'ok' if self.holds else 'MISSED'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES))
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/missed"
        mp.spawn(rank_main, (f"{folder}/meet", given.models, given.schedules, given.rounds, out), nprocs=RANKS)
        missed = int(Path(out).read_text())
    print(f"{missed} of {len(given.models) * len(given.schedules) * given.rounds} differ by more than {WITHIN:.0%}")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
