"""A plan file of one's own: the order of every action, from a CSV file, checked and then run as it stands.

    torchrun --standalone --nproc-per-node 2 examples/own_plan.py
    penstock check runs/own_plan.csv
    penstock show runs/own_plan.csv --html runs/own_plan.html

A row is a rank, a cell an action: `1F0` is the forward of stage 1 on microbatch 0, `I` and `W` are the two halves of a
backward. A plan may come from anywhere (a solver, a spreadsheet, torch's own files); what is wrong with it is said before it
runs, with row and column.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock
from penstock.plan import check, load

# Rank 0 has stages 0 and 3, rank 1 has 1 and 2. Weight gradients wait until a rank would be idle.
PLAN = """\
0F0,0F1,3F0,3I0,3F1,3I1,3W0,0I0,0W0,3W1,0I1,0W1
1F0,2F0,1F1,2F1,2I0,1I0,2W0,2I1,1I1,2W1,1W0,1W1
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=Path("runs/own_plan.csv"))
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)

    dist.init_process_group("gloo")
    if dist.get_rank() == 0 and not options.file.exists():
        options.file.parent.mkdir(parents=True, exist_ok=True)
        options.file.write_text(PLAN, encoding="utf-8")
    dist.barrier()
    plan = load(options.file)
    check(plan)

    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(plan.num_stages)]
    here = plan.placement.stages_of(dist.get_rank())
    stages = [penstock.PipelineStage(modules[index], index, plan.num_stages, "cpu") for index in here]
    schedule = penstock.Schedule.from_plan(plan, stages, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD([p for index in here for p in modules[index].parameters()], lr=0.1)
    x, y = torch.randn(2, 16, 32)
    for step in range(options.steps):
        losses: list[Tensor] = []
        schedule.step(x, target=y, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        if losses and step in (0, options.steps - 1):
            print(f"step {step}: loss {torch.stack(losses).mean():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
