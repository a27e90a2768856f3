"""Python's garbage in step: a collection on one rank makes all others wait, so all collect at the same step.

    pipe = Pipeline(model, example, collect_every=50)

Objects that nobody refers to in a circle are freed at once, as ever; only the search for circles is moved.
"""

from __future__ import annotations

import gc
import threading
import weakref

_GENERATION = 1  # what survived several steps is looked at by nobody; it is the model, and would cost the most
_waiting = 0  # pipelines that have taken the collector over
_was_on = True  # before the first of them
_lock = threading.Lock()


class Garbage:
    """Collects after every so many steps, and at no other time while it lives."""

    def __init__(self, every: int) -> None:
        global _waiting, _was_on
        self.every = every
        with _lock:
            if _waiting == 0:
                _was_on = gc.isenabled()
            _waiting += 1
            gc.disable()
        weakref.finalize(self, _give_back)

    def after(self, steps: int) -> None:
        """`steps` are done, the same number on all ranks."""
        if steps % self.every == 0:
            gc.collect(_GENERATION)


def _give_back() -> None:
    global _waiting
    with _lock:
        _waiting -= 1
        if _waiting == 0 and _was_on:
            gc.enable()
