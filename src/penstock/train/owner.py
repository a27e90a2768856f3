"""Whose a folder of a run is: one job writes to it at a time.

with owned(Path("runs/train")):      # a PenstockError if another job is at work there
    ...                              # ranks, each of them: with in_use(Path("runs/train"))

A launcher that is killed owns nothing any more, but its ranks live on until they notice: the folder is free when they have ended.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TextIO

from penstock.errors import PenstockError

try:
    import fcntl
except ImportError:  # a system without these locks
    fcntl = None  # type: ignore[assignment]

_FILE = ".owner"  # locked by the process that owns the folder; the kernel lets go of it when that process ends
_RANKS = ".ranks"  # locked by every rank that writes to the folder, for all of them together
_PATIENCE = 30.0  # seconds for ranks of a former run to end; they hear within the heartbeat that their launcher is gone
_NAP = 0.1


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Two jobs in one folder would put away each other's checkpoints and mix their logs."""
    with _locked(folder, _FILE, alone=True) as (file, free):
        if not free:
            file.seek(0)
            who = file.read(80).strip() or "another process"
            raise PenstockError(
                f"{folder} belongs to a run that is at work ({who}); give another --output, or wait for its end"
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        _wait_for_ranks(folder)
        yield


def _wait_for_ranks(folder: Path) -> None:
    end = time.monotonic() + _PATIENCE
    while True:
        with _locked(folder, _RANKS, alone=True) as (_, free):
            if free:
                return
        if time.monotonic() > end:
            raise PenstockError(
                f"{folder} is still written to by ranks of a run whose launcher has gone; they did not end within "
                f"{_PATIENCE:g} s. End these processes, or give another --output"
            )
        time.sleep(_NAP)


@contextmanager
def _locked(folder: Path, name: str, *, alone: bool) -> Iterator[tuple[TextIO, bool]]:
    """The file, and whether nobody is in the way; a file system without locks says that nobody is."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("a+", encoding="utf-8") as file:
        free = True
        if fcntl is not None:
            try:
                fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            except BlockingIOError:
                free = False
            except OSError:  # a file system without these locks
                pass
        _HELD.add(file)
        try:
            yield file, free
        finally:
            _HELD.discard(file)


def _let_go() -> None:
    """In a forked process, such as one that loads data: it may outlive the one that owns the folder."""
    for file in _HELD:
        with suppress(OSError):
            os.close(file.fileno())  # not `close`, which would write what the other has still to write
    _HELD.clear()


# In a rank, after somebody has come to own the folder: nobody else does before this rank has ended.
in_use = partial(_locked, name=_RANKS, alone=False)
_HELD: set[TextIO] = set()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
