"""A small GPT over bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.errors import UnknownNameError

BYTES: Final = 256


@dataclass(frozen=True)
class Size:
    """How large a GPT is."""

    width: int
    layers: int
    heads: int
    length: int


SIZES: Final = {
    "tiny": Size(width=32, layers=3, heads=2, length=32),
    "small": Size(width=128, layers=6, heads=4, length=96),
    "medium": Size(width=320, layers=8, heads=8, length=192),
    "large": Size(width=768, layers=12, heads=12, length=512),
}


def size_of(name: str) -> Size:
    if name not in SIZES:
        raise UnknownNameError(f"no size is called {name!r}; there are: {', '.join(SIZES)}")
    return SIZES[name]


class Block(nn.Module):
    """Attention and a two-layer network, each added to what comes in."""

    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        self.heads = size.heads
        self.before_attention = nn.LayerNorm(size.width)
        self.queries_keys_values = nn.Linear(size.width, 3 * size.width)
        self.mix = nn.Linear(size.width, size.width)
        self.before_network = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)
        self.dropout = nn.Dropout(dropout)

    def attend(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.queries_keys_values(x).view(rows, length, 3, self.heads, width // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(rows, length, width)
        made: Tensor = self.mix(mixed)
        return made

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.before_attention(x)))
        made: Tensor = x + self.dropout(self.down(functional.gelu(self.up(self.before_network(x)))))
        return made


class GPT(nn.Module):
    """Bytes in, a score for each next byte out."""

    def __init__(self, size: Size, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size, dropout) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, BYTES, bias=False)
        self.apply(_initialise)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02 if isinstance(module, nn.Embedding) else module.weight.shape[1] ** -0.5)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def next_byte_loss(scores: Tensor, following: Tensor) -> Tensor:
    """The mean over all positions, in nats."""
    return functional.cross_entropy(scores.flatten(0, 1), following.flatten())
