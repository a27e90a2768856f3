"""Text files: read up to a size limit, with errors that name the file.

read_text("plan.csv", ParseError, limit=1 << 20)
write_text("plan.csv", "0F0,0B0", PlanError)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

from penstock.errors import PenstockError

_PIECE = 1 << 20


@contextmanager
def _named(path: str | PathLike[str], error: type[PenstockError], done: str) -> Iterator[None]:
    """Convert an error in reading or writing a file into an error that names the file."""
    try:
        yield
    except OSError as problem:
        raise error(f"{path} cannot be {done}: {problem.strerror or problem}") from problem
    except ValueError as problem:  # a name with a zero byte in it
        raise error(f"{str(path)!r} is no name of a file: {problem}") from problem


def write_text(path: str | PathLike[str], text: str, error: type[PenstockError]) -> None:
    with _named(path, error, "written"):
        Path(path).write_text(text, encoding="utf-8")


def read_text(path: str | PathLike[str], error: type[PenstockError], *, limit: int, hint: str = "") -> str:
    """The text of a file of at most `limit` bytes; `hint` ends the error for a longer one, and may name its {size}.

    Some editors put a mark of the encoding before it, which is no part of the text.
    """
    with _named(path, error, "read"), Path(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size  # of a pipe it is not known
        data = bytearray()  # piece by piece: one read would take as much memory as the limit allows, whatever is there
        while size <= limit and (piece := file.read(min(limit + 1 - len(data), _PIECE))):
            data += piece
        size = max(size, len(data))
    if size > limit:
        raise error(f"{path} has {size:,} bytes; such files are read up to {limit:,}{hint.format(size=size)}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise error(f"{path} is no text: {problem}") from None
