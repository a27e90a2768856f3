"""A small GPT over bytes, and real text for it without a download: the sources of the running Python, or any file or folder.

A batch depends on the seed and the step alone, so every rank makes the same, and a resumed run goes on where it was.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.errors import PenstockError, UnknownNameError

if TYPE_CHECKING:  # the command looks here for a size before it starts the ranks
    from penstock.front import Pipeline
    from penstock.train import Job, TrainOptions

BYTES: Final = 256
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}
_MOST = 32 << 20  # bytes that are read
_TEMPERATURE = 0.7  # of generated text
_EVERY = 20  # one file in so many is for validation


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


@dataclass(frozen=True)
class Text:
    """Bytes to train on and bytes to validate on."""

    train: Tensor
    validation: Tensor
    source: str

    def batch(self, step: int, *, rows: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
        """Tokens and, for each, the one that follows."""
        return _windows(self.train, torch.Generator().manual_seed(_key(seed, step)), rows, length)

    def validation_batches(self, count: int, *, rows: int, length: int) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(12345)
        return [_windows(self.validation, generator, rows, length) for _ in range(count)]


def _key(seed: int, step: int) -> int:
    """A number for both; torch's generator on the CPU looks at 32 bits of it, so they must be mixed."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {step}".encode(), digest_size=4).digest(), "little")


def _windows(data: Tensor, generator: torch.Generator, rows: int, length: int) -> tuple[Tensor, Tensor]:
    starts = torch.randint(0, data.numel() - length - 1, (rows,), generator=generator)
    cut = torch.stack([data[start : start + length + 1] for start in starts.tolist()]).long()
    return cut[:, :-1].contiguous(), cut[:, 1:].contiguous()


def read_text(path: str | None = None, *, length: int = 128) -> Text:
    """The standard library's sources, or a file, or all files of a folder."""
    root = Path(path) if path is not None else Path(sysconfig.get_paths()["stdlib"])
    files = _files(root, "*" if path is not None else "*.py")
    train, validation = bytearray(), bytearray()
    for number, file in enumerate(files):
        (validation if len(files) > 1 and number % _EVERY == _EVERY // 2 else train).extend(file.read_bytes())
        if len(train) + len(validation) > _MOST:
            break
    least = 4 * (length + 2)
    if len(validation) < least:  # one file, or few: the end of it
        cut = max(len(train) - max(len(train) // _EVERY, least), 0)
        validation, train = train[cut:] + validation, train[:cut]
    if len(train) < least:
        total = len(train) + len(validation)
        raise PenstockError(f"{root} holds {total} bytes of text; training needs at least {2 * least}")
    source = f"the sources of Python {platform.python_version()}" if path is None else str(root)
    counted = "1 file" if len(files) == 1 else f"{len(files)} files"
    kept, held_out = (torch.frombuffer(data, dtype=torch.uint8) for data in (train, validation))
    return Text(kept, held_out, f"{source} ({counted})")


def _files(root: Path, pattern: str) -> list[Path]:
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise PenstockError(f"there is no file or folder {root}; give --data a text file, or a folder of them")
    found = (file for file in sorted(root.rglob(pattern)) if not _SKIPPED & set(file.relative_to(root).parts))
    return [file for file in found if file.is_file()]


def build(options: TrainOptions) -> Job:
    """What `penstock train` trains unless it is given a function of the user's."""
    from penstock.train.train_job import Job

    size = size_of(options.size)
    text = held_out = read_text(options.data, length=size.length)
    if options.validation is not None:
        other = read_text(options.validation, length=size.length)
        held_out = replace(other, validation=torch.cat([other.train, other.validation]))
    model = GPT(size, dropout=options.dropout)
    count = sum(p.numel() for p in model.parameters())

    def rate(step: int) -> float:
        warm = max(1, min(20, options.steps // 10))
        left = 1 - step / max(options.steps, 1)
        return min((step + 1) / warm, 1.0) * (0.1 + 0.9 * left)

    return Job(
        model,
        partial(text.batch, rows=options.batch, length=size.length, seed=options.seed),
        next_byte_loss,
        partial(torch.optim.AdamW, lr=options.learning_rate, betas=(0.9, 0.95)),
        validation=held_out.validation_batches(2, rows=options.batch, length=size.length),
        rate=rate,
        tokens=options.batch * size.length,
        title=f"GPT of {count:,} parameters ({options.size}) on {text.source}",
        text=text,
    )


def generate(pipe: Pipeline, text: Text, count: int, *, length: int, seed: int) -> str:
    """So many bytes after the beginning of the validation text; every rank draws the same."""
    generator = torch.Generator().manual_seed(seed)
    window = text.validation[:length].long().unsqueeze(0)
    made = bytearray()
    for _ in range(count):
        scores = pipe.predict(window)[0, -1].float().cpu() / _TEMPERATURE
        following = torch.multinomial(scores.softmax(-1), 1, generator=generator)
        made.append(int(following))
        window = torch.cat([window[:, 1:], following.unsqueeze(0)], dim=1)
    return made.decode("utf-8", errors="replace")
