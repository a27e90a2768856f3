"""Batches of an iterable, by number, with a position that goes into a checkpoint.

source = Repeated(DataLoader(rows, batch_size=16, shuffle=True))
source.at(0), source.at(1)                      # the same batches whoever asks, and however often
state = source.state_dict()                     # a source that loads it goes on with number 2

Data with state_dict() and load_state_dict(), as torchdata's StatefulDataLoader has them, says itself where it is. Any
other is run through again up to where it was. Random numbers that the data draws (a shuffle, an augmentation) come from a
stream of their own: they are the same on every rank, in a run that was resumed, and however many the model draws.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from penstock.errors import PenstockError
from penstock.front.companions import random_state, same_random_numbers, set_random_state
from penstock.nest import Value

_NOTHING = object()
_HOST = torch.device("cpu")


class Repeated:
    """For example ``Repeated(loader).at(3)``: batch 3 of data that is run through again and again."""

    def __init__(self, data: Iterable[Value]) -> None:
        self.data = data
        self.knows_its_place = hasattr(data, "state_dict") and hasattr(data, "load_state_dict")
        if isinstance(data, Iterator) and not self.knows_its_place:
            raise PenstockError(
                f"the data is a {type(data).__name__}, which can be run through only once; return a list, a DataLoader, an "
                "object whose __iter__ begins anew, or one with state_dict() and load_state_dict()"
            )
        self._first: object = _NOTHING
        self._held: object = _NOTHING
        self._iterator: Iterator[object] = iter(())
        self._next = self._taken = 0
        self._random = self._begun = _first_numbers()
        self._at_start = self.state_dict()

    def at(self, number: int) -> Value:
        """Batch `number`, from 0 over all passes; cheapest in order. What comes after the end is the beginning."""
        if number == 0 and self._first is not _NOTHING:
            return self._first  # asked for again and again, as an example
        if number == self._next - 1 and self._held is not _NOTHING:
            return self._held
        if number < self._next:
            self.load_state_dict(self._at_start)
        while self._next <= number:
            self._advance()
        return self._held

    def state_dict(self) -> dict[str, object]:
        """Where the data is."""
        own = self.data.state_dict() if self.knows_its_place else None  # type: ignore[attr-defined]
        return {"next": self._next, "taken": self._taken, "begun": self._begun, "random": self._random, "data": own}

    def load_state_dict(self, state: dict[str, Value]) -> None:
        """Go on from there."""
        self._next, self._taken, self._begun = state["next"], state["taken"], state["begun"]
        self._held = _NOTHING
        self._random = state["random" if self.knows_its_place else "begun"]
        if self.knows_its_place:
            self.data.load_state_dict(state["data"])  # type: ignore[attr-defined]
        with self._own_numbers():
            self._iterator = iter(self.data if self._taken or self.knows_its_place else ())
            for taken in range(0 if self.knows_its_place else self._taken):
                self._held = next(self._iterator, _NOTHING)
                if self._held is _NOTHING:
                    raise PenstockError(
                        f"the data ended after {taken} batches, and the run had taken {self._taken} of them; resume with the "
                        "same data"
                    )

    def _advance(self) -> None:
        with self._own_numbers():
            self._held = next(self._iterator, _NOTHING)
            if self._held is _NOTHING:
                self._taken, self._begun = 0, random_state(_HOST)
                self._iterator = iter(self.data)
                self._held = next(self._iterator, _NOTHING)
        if self._held is _NOTHING:
            raise PenstockError("the data holds no batch; expected at least one in every pass")
        if self._next == 0:
            self._first = self._held
        self._next += 1
        self._taken += 1

    @contextmanager
    def _own_numbers(self) -> Iterator[None]:
        """Inside, torch, Python and numpy draw from the stream of the data."""
        with same_random_numbers(_HOST):
            set_random_state(self._random, _HOST)
            try:
                yield
            finally:
                self._random = random_state(_HOST)


def _first_numbers() -> dict[str, object]:
    """The first numbers of the stream: they follow from torch's seed, which is the same on every rank."""
    seed = torch.initial_seed() % 2**32
    with same_random_numbers(_HOST):
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        return random_state(_HOST)
