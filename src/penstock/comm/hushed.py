"""Calls of torch's store during which torch itself keeps quiet.

    with hushed():
        store.check(["key"])

A call that is under way when the store's process dies makes torch's C++ print a page with a stack for each connection, and
then raise what the page says. penstock says it in a line. Torch has no option for that, but the level of its log is a variable
that its library exports; where it does not, torch prints.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_ERROR = 2  # the level above warnings


def _level() -> ctypes.c_int | None:
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None


class _Log:
    """The level of torch's log, and how many threads want it to be quiet."""

    def __init__(self) -> None:
        self.level = _level()
        self.before = 0
        self.inside = 0
        self.lock = threading.Lock()


_LOG = _Log()


@contextmanager
def hushed() -> Iterator[None]:
    """For calls that end at once: warnings of other threads are not printed either."""
    if _LOG.level is None:
        yield
        return
    with _LOG.lock:
        if not _LOG.inside:
            _LOG.before = _LOG.level.value
            _LOG.level.value = max(_LOG.before, _ERROR)
        _LOG.inside += 1
    try:
        yield
    finally:
        with _LOG.lock:
            _LOG.inside -= 1
            if not _LOG.inside:
                _LOG.level.value = _LOG.before
