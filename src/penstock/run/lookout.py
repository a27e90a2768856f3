"""Lookout: a thread that writes where this rank is into a folder, for `penstock top`, and shows it all when SIGUSR1 comes.

lookout = Lookout(transport, "runs/mine")      # on every rank
print(read_folder("runs/mine"))                # in any other process, also when the job is stuck
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.comm.transport import Transport
from penstock.comm.whereabouts import Whereabouts, table
from penstock.errors import PenstockError

FOLDER = "top"  # in the folder of the run
_TICK = 0.25  # seconds between looks
_STALE = 5.0  # seconds after which what a file says is of the past
_LARGEST = 1 << 16


class Lookout:
    """Writes from when it is made until `close`, or until the transport is gone."""

    def __init__(self, transport: Transport, folder: str | Path) -> None:
        self.folder = Path(folder) / FOLDER
        self.folder.mkdir(parents=True, exist_ok=True)
        if transport.rank == 0:
            for old in self.folder.glob("rank-*.json"):  # of an earlier run with more ranks
                if int("0" + "".join(filter(str.isdigit, old.stem))) >= transport.num_ranks:
                    old.unlink(missing_ok=True)
        self._transport = weakref.ref(transport)
        self._num_ranks = transport.num_ranks
        self._file = self.folder / f"rank-{transport.rank}.json"
        self._put(transport)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._write, name="penstock lookout", daemon=True)
        self._thread.start()
        self._before = _on_signal(transport, self.show)

    def _put(self, transport: Transport) -> None:
        fresh = self._file.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(transport.where().encode())
        fresh.replace(self._file)

    def _write(self) -> None:
        while not self._stopping.wait(_TICK):
            transport = self._transport()
            if transport is None:
                return
            with suppress(OSError):  # a full disk must not end the job
                self._put(transport)
            del transport

    def show(self) -> None:
        """Write the table to the terminal's error stream."""
        sys.stderr.write(f"{read_folder(self.folder.parent)}\n")
        sys.stderr.flush()

    def close(self) -> None:
        self._stopping.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)
        self._file.unlink(missing_ok=True)
        transport = self._transport()
        if transport is not None:
            transport.asked = None
        if self._before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, self._before)
            self._before = None


def _on_signal(transport: Transport, show: Callable[[], None]) -> Any:
    """Let SIGUSR1 show the table, unless the program has other plans for it; what was there before comes back.

    In a wait of the backend no handler of Python's runs. There the transport's watcher hears of the signal and calls `asked`.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or not hasattr(signal, "SIGUSR1") or signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        return None
    own = weakref.WeakMethod(show)
    last = [0.0]

    def ask() -> None:
        now, method = time.monotonic(), own()
        if method is not None and now - last[0] > 1.0:  # the watcher and the handler may both hear of one signal
            last[0] = now
            method()

    transport.asked = ask
    return signal.signal(signal.SIGUSR1, lambda *_: ask())


def read_folder(folder: str | Path) -> str:
    """The table of a running job; an error if nobody writes into the folder.

    print(read_folder("runs/train"))
    """
    place = Path(folder) / FOLDER
    found: dict[int, Whereabouts] = {}
    past: list[str] = []
    for file in sorted(place.glob("rank-*.json")):
        try:
            with file.open("rb") as stream:
                one = Whereabouts.decode(stream.read(_LARGEST))
            age = time.time() - file.stat().st_mtime
        except OSError:
            continue  # the rank ends just now
        found[one.rank] = one
        if age > _STALE:
            past.append(
                f"rank {one.rank} has written nothing for {age:.0f} s: it has ended, is stopped, or its disk is full"
            )
    if not found:
        raise PenstockError(
            f"{folder} has no running job: give the output folder of a `penstock train` that runs, or that of "
            "Pipeline(run_folder=...)"
        )
    return "\n".join([table(list(found.values()), num_ranks=max(found) + 1), *past])
