"""Real text without a download: the sources of the Python that is running, as bytes; or any file or folder.

A batch depends on the seed and the step alone, so every rank makes the same, and a resumed run goes on where it was.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.errors import PenstockError
from penstock.front import Pipeline

_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}
_MOST = 32 << 20  # bytes that are read
_TEMPERATURE = 0.7  # of generated text
_EVERY = 20  # one file in so many is for validation


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
    files = list(_files(root, "*" if path is not None else "*.py"))
    train, validation, total = bytearray(), bytearray(), 0
    for number, file in enumerate(files):
        data = file.read_bytes()
        total += len(data)
        (validation if len(files) > 1 and number % _EVERY == _EVERY // 2 else train).extend(data)
        if total > _MOST:
            break
    least = 4 * (length + 2)
    if len(validation) < least:  # one file, or few: the end of it
        cut = max(len(train) - max(len(train) // _EVERY, least), 0)
        validation, train = train[cut:] + validation, train[:cut]
    if len(train) < least:
        raise PenstockError(f"{root} holds {total} bytes of text; training needs at least {2 * least}")
    source = f"the sources of Python {platform.python_version()}" if path is None else str(root)
    counted = "1 file" if len(files) == 1 else f"{len(files)} files"
    kept, held_out = (torch.frombuffer(data, dtype=torch.uint8) for data in (train, validation))
    return Text(kept, held_out, f"{source} ({counted})")


def _files(root: Path, pattern: str) -> Iterator[Path]:
    if root.is_file():
        yield root
        return
    if not root.is_dir():
        raise PenstockError(f"there is no file or folder {root}; give --data a text file, or a folder of them")
    for file in sorted(root.rglob(pattern)):
        if file.is_file() and not _SKIPPED & set(file.relative_to(root).parts):
            yield file


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
