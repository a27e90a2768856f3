"""One answer for all ranks, although each asks on its own.

    text = agreed("cut/3fa9c1", measure)        # the same text on every rank

Every rank captures the model by itself, and two measurements are never quite the same. Who asks first answers, and
leaves the answer in the store of the process group; the others take it from there. It is no collective call: a rank that
captures alone waits for nobody. Within a process an answer is kept, so that ranks as threads get the same one, and a
second capture the same as the first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from penstock.errors import CaptureError

PATIENCE = timedelta(minutes=10)  # for the rank that answers

_known: dict[str, str] = {}
_lock = threading.Lock()


def agreed(question: str, answer: Callable[[], str], *, kind: str = "") -> str:
    """The answer of the rank that asked first. In this process, an answer is given again to questions of its kind."""

    def own() -> str:
        with _lock:
            key = f"{kind}/{question}"
            if key not in _known:
                _known[key] = answer()
            return _known[key]

    store = _store()
    if store is None:
        return own()
    # The n-th time that a rank asks it gets the answer to the n-th question of all others.
    place = f"penstock/{question}/{store.add(f'penstock/{question}/asked by {dist.get_rank()}', 1)}"
    if store.add(f"{place}/answering", 1) == 1:
        text = ""
        try:
            text = own()
        finally:
            store.set(place, text)
        return text
    try:
        store.wait([place], PATIENCE)
    except dist.DistError as error:
        raise CaptureError(
            f"another rank measures the model for all, and has not told the result for {PATIENCE}; say where to cut "
            "(split_spec=), or give the same profile= on every rank"
        ) from error
    return store.get(place).decode() or own()


def forget() -> None:
    """Answer anew what was answered in this process before."""
    with _lock:
        _known.clear()


def _store() -> Any:
    """Of the default process group; None without one that connects processes."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if "fake" in dist.get_backend():
        return None
    return dist.distributed_c10d._get_default_store()
