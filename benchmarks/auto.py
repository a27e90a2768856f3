"""schedule="auto" with an automatic cut, against equal layer counts under 1F1B: two gloo ranks, one thread each.

    .venv/bin/python benchmarks/auto.py [--steps N]

The model is a transformer whose head is heavy: six blocks of width 128 and a vocabulary of 16,384. Both pipelines live in the
same two processes and take turns, step by step, so that noise hits both alike; the ratio is the median of those of the pairs.
Exits with 1 when auto is less than 1.15 times as fast.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

RANKS, MICROBATCHES, WANTED = 2, 8, 1.15
WIDTH, LENGTH, BLOCKS, VOCABULARY = 128, 64, 6, 16_384


class HeavyHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(x)
        return scores


def loss_fn(scores: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten())


def rank_main(rank: int, meeting: str, steps: int, out: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    from penstock import Pipeline, SplitPoint

    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (2 * MICROBATCHES, LENGTH))
    half = {f"blocks.{BLOCKS // 2}": SplitPoint.BEGINNING}
    pipes = {
        "equal layers, 1F1B": Pipeline(
            HeavyHead(),
            (tokens,),
            loss_fn=loss_fn,
            schedule="1f1b",
            microbatches=MICROBATCHES,
            split_spec=half,
            profile=False,
        ),
        "auto": Pipeline(
            HeavyHead(), (tokens,), example_target=tokens, loss_fn=loss_fn, schedule="auto", microbatches=MICROBATCHES
        ),
    }
    taken: dict[str, list[float]] = {name: [] for name in pipes}
    for number in range(steps + 2):
        for name, pipe in pipes.items():
            dist.barrier()
            began = time.perf_counter()
            pipe.step(tokens, target=tokens)
            dist.barrier()
            taken[name] += [time.perf_counter() - began] if number > 1 else []
            pipe.zero_grad()
    if rank == 0:
        ratio = statistics.median(slow / fast for slow, fast in zip(*taken.values(), strict=True))
        chosen = pipes["auto"].plan
        for name, seconds in taken.items():
            print(f"{name:<20} {1e3 * statistics.median(seconds):8.1f} ms a step")
        print(f"auto chose {chosen.name} with {chosen.num_stages} stages: {ratio:.2f} times as fast (wanted {WANTED})")
        Path(out).write_text(str(ratio))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    steps = parser.parse_args().steps
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (f"{folder}/meet", steps, f"{folder}/ratio"), nprocs=RANKS)
        ratio = float(Path(f"{folder}/ratio").read_text())
    sys.exit(0 if ratio >= WANTED else 1)


if __name__ == "__main__":
    main()
