"""Small models, each with something that capture must get right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.capture import pipe_split


class Chain(nn.Module):
    """Linear layers with dropout, marked after each but the last."""

    def __init__(self, layers: int = 3, dropout: float = 0.5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            if i:
                pipe_split()
            x = self.dropout(torch.tanh(layer(x)))
        return x


class Skips(nn.Module):
    """A value of stage 0 is used by stages 1, 2 and 3, one of stage 1 by stage 3."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        pipe_split()
        second = self.b(first.relu())
        pipe_split()
        third = self.c(second) * first
        pipe_split()
        return self.d(third) + first - second


class Arguments(nn.Module):
    """Uses its arguments in another order than it takes them, and one only in the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor, *, late: Tensor | None = None, scale: float = 1.0) -> Tensor:
        z = self.a(y) - x
        pipe_split()
        z = self.b(z) * scale
        return z if late is None else z * late


class Tied(nn.Module):
    """An embedding and a head that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        pipe_split()
        x = self.middle(x)
        pipe_split()
        return self.head(x)


@dataclass
class Answer:
    """An output that nobody registered with torch."""

    value: Tensor
    parts: dict[str, Any]
    note: str = ""
    nothing: Any = None


class Structured(nn.Module):
    """Takes and returns containers; values cross a mark inside them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, batch: dict[str, Tensor], pair: tuple[Tensor, int]) -> Answer:
        x = self.a(batch["x"]) * pair[1]
        count = batch["x"].shape[0]
        pipe_split()
        return Answer(self.b(x) + pair[0], {"early": x, "sizes": [count, 7]}, note="done")


class Normed(nn.Module):
    """Batch norm in both stages: running statistics are written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b, self.m = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.n(self.a(x))
        pipe_split()
        return self.m(self.b(x))


class Regions(nn.Module):
    """Marks inside autocast, no_grad and a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.a(x)
            pipe_split()
            x = self.b(x)
        x = x.float()
        with torch.no_grad():
            frozen = self.c(x)
        pipe_split()
        x = checkpoint(lambda v: self.dropout(self.d(v)).sin(), x, use_reentrant=False)
        return x + frozen


class InPlace(nn.Module):
    """Writes to a value that another stage made, and reads it in a third."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        y = x.mul_(3)
        pipe_split()
        y.mul_(2)
        z = self.b(y)
        z.add_(1)
        pipe_split()
        return self.c(z) + y


class Constants(nn.Module):
    """Tensors made in forward, plain tensor attributes, buffers that are not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.table = torch.arange(4.0)
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.tensor([1.0, 0.0, 1.0, 1.0], device=x.device)
        positions = torch.arange(x.shape[1], device=x.device)
        x = self.a(x) * mask + self.table + self.shift
        pipe_split()
        return self.b(x) * mask * self.scale + positions + self.shift
