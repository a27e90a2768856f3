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


_LEVEL = _level()
_LOCK = threading.Lock()
_BEFORE: list[int] = []  # the level that the log had before the first came in, once for each that is in


@contextmanager
def hushed() -> Iterator[None]:
    """For calls that end at once: warnings of other threads are not printed either."""
    if _LEVEL is None:
        yield
        return
    with _LOCK:
        _BEFORE.append(_BEFORE[0] if _BEFORE else _LEVEL.value)
        _LEVEL.value = max(_LEVEL.value, _ERROR)
    try:
        yield
    finally:
        with _LOCK:
            before = _BEFORE.pop()
            if not _BEFORE:
                _LEVEL.value = before
