"""Stages by hand, 1F1B: the manual way of PyTorch's tutorial. Arguments: a file for the ranks to meet, and the rank."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def main() -> None:
    rank = int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
    x, y = torch.randn(16, 8), torch.randn(16, 8)
    stage = PipelineStage(parts[rank], rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.MSELoss())
    optimizer = torch.optim.SGD(parts[rank].parameters(), lr=0.1)
    losses: list[torch.Tensor] = []
    print(Schedule1F1B.__module__.split(".")[0])
    for _ in range(3):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        optimizer.step()
    print("losses", *(loss.item() for loss in losses))
    print("norm", sum(p.norm().item() for p in parts[rank].parameters()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
