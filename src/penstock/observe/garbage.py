"""Python's garbage in step: a collection on one rank makes all others wait, so all collect at the same step.

    pipe = Pipeline(model, example, collect_every=50)

Objects that nobody refers to in a circle are freed at once, as ever; only the search for circles is moved.
"""

from __future__ import annotations

import gc
import threading
import weakref

from penstock.batch.batch import Batch
from penstock.observe.observer import StepObserver, StepView

_GENERATION = 1  # what survived several steps is looked at by nobody; it is the model, and would cost the most
_waiting = 0  # pipelines that have taken the collector over
_was_on = True  # before the first of them
_lock = threading.Lock()


class Garbage(StepObserver):
    """Collects at the end of every so many training steps, and at no other time while it lives."""

    def __init__(self, every: int) -> None:
        global _waiting, _was_on
        self.every = every
        self._trains = False
        with _lock:
            if _waiting == 0:
                _was_on = gc.isenabled()
            _waiting += 1
            gc.disable()
        weakref.finalize(self, _give_back)

    def before_step(self, step: StepView, batch: Batch) -> bool:
        self._trains = batch.train
        return False

    def after_step(self, step: StepView) -> None:
        if self._trains and (step.number + 1) % self.every == 0:  # the same number on all ranks
            gc.collect(_GENERATION)


def _give_back() -> None:
    global _waiting
    with _lock:
        _waiting -= 1
        if _waiting == 0 and _was_on:
            gc.enable()
