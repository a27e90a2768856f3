"""A schedule of one's own: a function, proved and drawn before anything runs, then trained with.

    torchrun --standalone --nproc-per-node 2 examples/own_schedule.py

Here: 1F1B that keeps at most `limit` microbatches on any rank. A lower limit takes less memory and more time.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

import penstock
from penstock.lower import lower
from penstock.plan import check
from penstock.plan.actions import backward, forward
from penstock.schedules import Recipe, Sizes, register
from penstock.show import to_table
from penstock.simulate import simulate


def limited(limit: int) -> Recipe:
    """1F1B with at most `limit` microbatches in flight on each rank."""

    def rank_actions(sizes: Sizes, rank: int) -> list[int]:
        ahead = min(sizes.num_ranks - rank, limit, sizes.num_microbatches)
        actions = [forward(rank, microbatch) for microbatch in range(ahead)]
        for microbatch in range(sizes.num_microbatches):
            actions.append(backward(rank, microbatch))
            if microbatch + ahead < sizes.num_microbatches:
                actions.append(forward(rank, microbatch + ahead))
        return actions

    return Recipe(f"1f1b-at-most-{limit}", f"1F1B, {limit} in flight", rank_actions, stages_per_rank=1)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)

    dist.init_process_group("gloo")
    recipe = register(limited(options.limit))
    plan = recipe(dist.get_world_size(), 4)
    check(lower(plan), sends="blocking")  # complete, in order, and free of deadlock even if every send waits
    timeline = simulate(plan)
    if dist.get_rank() == 0:
        print(to_table(timeline))
        print(f"bubble {timeline.bubble_makespan:.0%}, most microbatches held {max(timeline.peak_memory):g}")

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)))
    x, y = torch.randn(2, 16, 32)
    pipe = penstock.Pipeline(
        model, (x,), loss_fn=nn.functional.mse_loss, schedule=recipe.name, microbatches=4, profile=False
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for step in range(options.steps):
        result = pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step in (0, options.steps - 1):
            print(f"step {step}: loss {result.loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
