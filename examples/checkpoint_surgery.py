"""Checkpoint surgery: trained as four stages, continued as two, and taken out as a plain model.

    torchrun --standalone --nproc-per-node 2 examples/checkpoint_surgery.py

A checkpoint holds the model under its own names, and the optimizer by the names of its parameters. Which rank wrote what
does not matter, so a run may go on with other stages, other schedules and other numbers of ranks, or end in one process.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)))


def make_pipe(example: Tensor, *, schedule: str, stages: int) -> tuple[penstock.Pipeline, torch.optim.Optimizer]:
    pipe = penstock.Pipeline(
        make_model(),
        (example,),
        loss_fn=nn.functional.mse_loss,
        schedule=schedule,
        num_stages=stages,
        microbatches=4,
        profile=False,
    )
    return pipe, torch.optim.AdamW(pipe.parameters(), lr=1e-2)


def train(pipe: penstock.Pipeline, optimizer: torch.optim.Optimizer, data: Tensor, steps: int) -> float:
    x, y = data
    for _ in range(steps):
        result = pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()
    return result.loss


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpoint", default="runs/surgery")
    options = parser.parse_args(arguments)

    dist.init_process_group("gloo")
    data = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1))
    four, optimizer = make_pipe(data[0], schedule="zbv", stages=4)
    train(four, optimizer, data, options.steps)
    four.save(options.checkpoint, optimizer=optimizer, extra={"steps": options.steps})
    expected = train(four, optimizer, data, options.steps)

    two, optimizer = make_pipe(data[0], schedule="1f1b", stages=2)
    extra = two.load(options.checkpoint, optimizer=optimizer)
    continued = train(two, optimizer, data, extra["steps"])
    torch.testing.assert_close(continued, expected)
    if dist.get_rank() == 0:
        print(f"four stages end at loss {expected:.6f}, continued with two stages at {continued:.6f}")
        model = make_model()
        model.load_state_dict(penstock.load(options.checkpoint).model)
        print(f"the checkpoint in one process: loss {nn.functional.mse_loss(model(data[0]), data[1]):.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
