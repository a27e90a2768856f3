"""A pipe that wakes a thread out of `select`; signals are written to it too, even while the main thread waits in C."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress


class WakePipe:
    """Of one thread. Other threads call `wake`."""

    def __init__(self) -> None:
        self.out, self._in = os.pipe()
        for end in (self.out, self._in):
            os.set_blocking(end, False)
        self._before: int | None = None  # descriptor to which signals were written before

    def wake(self) -> None:
        with suppress(OSError):
            os.write(self._in, b"\0")

    def take_signals(self) -> bool:
        """Have signals written here from now on, in addition to where they were written before; in the main thread only. False
        if that was so already."""
        if threading.current_thread() is not threading.main_thread():
            return False
        before = signal.set_wakeup_fd(self._in, warn_on_full_buffer=False)
        if before == self._in:
            return False
        self._before = before
        return True

    def return_signals(self) -> None:
        if self._before is not None and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._before)
            self._before = None

    def interrupts(self) -> int:
        """Read the pipe: how often Ctrl-C was pressed, unless the program handles it itself."""
        try:
            numbers = os.read(self.out, 4096).replace(b"\0", b"")
        except OSError:
            return 0
        before = self._before
        if numbers and before is not None and before >= 0:
            with suppress(OSError):
                os.write(before, numbers)
        handled = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        return 0 if handled else numbers.count(signal.SIGINT)

    def close(self) -> None:
        if self._before is not None:
            with suppress(ValueError):  # of a child that was forked in a step
                signal.set_wakeup_fd(-1)
        for end in (self.out, self._in):
            with suppress(OSError):
                os.close(end)
