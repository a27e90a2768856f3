"""The traced way of the PyTorch tutorial: the whole model, a split point by name, stages built from the pipe."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from reporting import checksum, report
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipe_split, pipeline


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(20, 8)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(8, 20)

    def forward(self, tokens, scale):
        h = self.emb(tokens) * scale
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = torch.relu(self.first(x))
        pipe_split()
        return self.second(x)


def main() -> None:
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model, marked = Net(), Marked()
    tokens, y = torch.randint(0, 20, (2, 8, 5)).unbind()
    scale = torch.rand(8, 1, 1)
    pipe = pipeline(model, mb_args=(tokens[:2], scale[:2]), split_spec={"layers.2": SplitPoint.BEGINNING})
    stage = pipe.build_stage(rank, torch.device("cpu"), dist.group.WORLD)
    loss = nn.CrossEntropyLoss()
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=lambda out, y: loss(out.reshape(-1, 20), y.reshape(-1)))
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(tokens, scale)
        else:
            output = schedule.step(target=y, losses=losses)
            found.append([*map(float, losses), float(output.sum())])
        optimizer.step()
    whole = pipeline(marked, (torch.randn(2, 8),))
    x = torch.ones(2, 8)
    report(
        sys.argv[1],
        {
            "losses": found,
            "parameters": checksum(stage.submod),
            "stages": [pipe.num_stages, whole.num_stages],
            "whole": whole(x)[0].sum().item() - marked(x).sum().item(),
        },
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
