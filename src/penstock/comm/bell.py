"""A thread that sleeps until its bell rings: something is written to a pipe, as a signal does even where a program waits in C."""

from __future__ import annotations

import os
import threading
from contextlib import suppress


class BellThread:
    """Has a thread for `_listen`, which a subclass starts when it is ready, and which returns when `_stopping` is set."""

    def __init__(self, name: str) -> None:
        self._stopping = False
        self._bell, self._button = os.pipe()  # it sleeps in a `select` of the first; who writes to the second wakes it
        for end in (self._bell, self._button):
            os.set_blocking(end, False)
        self._thread = threading.Thread(target=self._listen, name=name, daemon=True)

    def _listen(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        """End the thread; the pipe is closed once nobody can write to it."""
        self._stopping = True
        with suppress(OSError):
            os.write(self._button, b"\0")
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            for end in (self._bell, self._button):
                with suppress(OSError):
                    os.close(end)
