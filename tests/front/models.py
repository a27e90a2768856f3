"""Small models that the tests of the front door share."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, WIDTH, LENGTH = 31, 16, 6
Model = TypeVar("Model", bound=nn.Module)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Words(nn.Module):
    """An embedding, some blocks, a head that may share the embedding's weight, a buffer."""

    counts: Tensor

    def __init__(self, *, tied: bool = False, dropout: float = 0.0, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("counts", torch.arange(WIDTH, dtype=torch.float64) / WIDTH)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.counts.to(self.embed.weight.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Chain(nn.Module):
    """Modules one after another, which `split_modules` cuts without capturing; the head shares the embedding's weight."""

    PARTS = ("embed", "layers.0", "layers.1", "layers.2", "layers.3", "layers.4", "head")

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5)))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        made: Tensor = self.head(self.layers(self.embed(tokens)))
        return made


class WithLoss(Words):
    """Returns its own loss."""

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        scores = super().forward(tokens)
        return {"loss": loss_fn(scores, labels), "scores": scores}


def loss_fn(scores: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def make(kind: type[Model] = Words, **options: Any) -> Model:  # type: ignore[assignment]  # the default is one
    torch.manual_seed(7)
    return kind(**options).double()


def batch(step: int = 0, rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, WORDS, (rows, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train_plainly(
    model: nn.Module, steps: int, *, microbatches: int = 4, clip: float | None = None
) -> list[tuple[float, float]]:
    """(loss, norm of the gradients) of each step, by a plain loop in one process."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    for step in range(steps):
        tokens, labels = batch(step)
        total = 0.0
        for x, y in zip(tokens.tensor_split(microbatches), labels.tensor_split(microbatches), strict=True):
            loss = loss_fn(model(x), y) * (len(x) / len(tokens))
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf") if clip is None else clip)
        optimizer.step()
        optimizer.zero_grad()
        found.append((total, norm.item()))
    return found
