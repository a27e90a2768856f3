"""Files: what somebody else wrote is read up to a bound, and what cannot be read or written is an error of penstock's own.

read_text("plan.csv", ParseError, limit=1 << 20)
write_text("plan.csv", "0F0,0B0", PlanError)
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from penstock.errors import PenstockError


def write_text(path: str | PathLike[str], text: str, error: type[PenstockError]) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as problem:
        raise error(f"{path} cannot be written: {problem.strerror or problem}") from problem
    except ValueError as problem:  # a name with a zero byte in it
        raise error(f"{str(path)!r} is no name of a file: {problem}") from problem


def read_text(
    path: str | PathLike[str], error: type[PenstockError], *, limit: int, encoding: str = "utf-8", hint: str = ""
) -> str:
    """The text of a file of at most `limit` bytes; `hint` ends the error for a longer one, and may name its {size}."""
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, 2) if file.seekable() else 0
            if size <= limit:
                if file.seekable():
                    file.seek(0)
                data = file.read(limit + 1)
                size = len(data)
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror or problem}") from problem
    except ValueError as problem:  # a name with a zero byte in it
        raise error(f"{str(path)!r} is no name of a file: {problem}") from problem
    if size > limit:
        raise error(f"{path} has {size:,} bytes; such files are read up to {limit:,}{hint.format(size=size)}")
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as problem:
        raise error(f"{path} is no text: {problem}") from None
