"""The manual way of the PyTorch tutorial: a small transformer, its stages made by hand, GPipe."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from reporting import checksum, report
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

VOCABULARY, WIDTH, LENGTH, LAYERS = 50, 16, 6, 4


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict(
            {str(i): nn.TransformerDecoderLayer(WIDTH, 2, 32, dropout=0.0) for i in range(LAYERS)}
        )
        self.norm: nn.Module | None = nn.LayerNorm(WIDTH)
        self.output: nn.Module | None = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens) if self.tok_embeddings else tokens
        for layer in self.layers.values():
            h = layer(h, h)
        h = self.norm(h) if self.norm else h
        return self.output(h) if self.output else h


def main() -> None:
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Transformer()
    keep = range(LAYERS // 2) if rank == 0 else range(LAYERS // 2, LAYERS)
    for name in list(model.layers):
        if int(name) not in keep:
            del model.layers[name]
    if rank == 0:
        model.norm = model.output = None
    else:
        model.tok_embeddings = None
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    loss = nn.CrossEntropyLoss()
    schedule = ScheduleGPipe(stage, 4, loss_fn=lambda out, y: loss(out.reshape(-1, VOCABULARY), y.reshape(-1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randint(0, VOCABULARY, (2, 8, LENGTH)).unbind()
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            output = schedule.step(target=y, losses=losses)
            found.append([*map(float, losses), float(output.sum())])
        optimizer.step()
    report(sys.argv[1], {"losses": found, "parameters": checksum(model)})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
