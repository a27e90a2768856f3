"""Random numbers for data: the same on all ranks of a pipeline, and drawn by samplers, datasets and collators only.

A rank that has dropout in its stages draws other numbers than its neighbours, so their random states part in the first step. What
draws batches from these states would give each rank batches of its own. So while a program of transformers or Lightning runs,
batches are drawn from a state that all ranks have from the first one, and the model from the ordinary one of each rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import torch

from penstock.checkpoint.plain import decode, encode
from penstock.front.companions import RandomNumbers, read_states
from penstock.front.own_stages import OwnStages
from penstock.nest import Value


class DataNumbers:
    """The state that the data of a pipeline is drawn from.

        numbers = DataNumbers(pipe)
        with numbers.shared():                  # all ranks: a run of a Trainer
            with numbers.drawing():
                batch = next(batches)           # the same on all ranks
            pipe.step(**batch)

    In a pipeline of one rank, and outside of `shared`, that is the ordinary one. While nothing but data draws, the numbers are
    those of a program without a pipeline, also after `shared`.
    """

    def __init__(self, pipe: OwnStages) -> None:
        self._pipe = pipe
        self._ordinary = RandomNumbers(torch.device("cpu"))
        self._state: dict[str, Value] | None = None  # None: data is drawn from the ordinary state
        self._before: dict[str, Value] = {}  # the ordinary state when `begin` was called
        self._is_drawing = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Around a run, on all ranks; inside another one it goes on with the same numbers."""
        if self._state is not None:
            yield
            return
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """On all ranks: from here on data is drawn from what the first rank's ordinary state is now."""
        if self._pipe.num_ranks > 1:
            made = self._pipe.ranks.broadcast(
                "the random numbers of the data", lambda: self._text(self._ordinary.state_dict())
            )
            self._state, self._before = decode(json.loads(made)), self._ordinary.state_dict()

    def end(self) -> None:
        """From here on data is drawn from the ordinary state again; if nothing else drew from it, it goes on after the data."""
        if self._state is not None:
            now = self._ordinary.state_dict()
            kept = {name: encode(state) == encode(self._before.get(name)) for name, state in now.items()}
            self._ordinary.load_state_dict({**now, **{k: v for k, v in self._state.items() if kept.get(k)}})
            self._state = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Around all that draws data."""
        if self._state is None or self._is_drawing:
            yield
            return
        before = self._ordinary.state_dict()
        self._ordinary.load_state_dict(self._state)
        self._is_drawing = True
        try:
            yield
        finally:
            self._is_drawing = False
            self._state = self._ordinary.state_dict()
            self._ordinary.load_state_dict(before)

    # -- in a checkpoint

    def dumps(self) -> str | None:
        """The state, None if it is the ordinary one, which goes through checkpoints anyway."""
        return None if self._state is None else self._text(self._state)

    def loads(self, text: str | None) -> None:
        """Go on from what the first rank of this replica gives, or else from its ordinary state; on all ranks of all replicas."""
        if self._state is None:
            return
        pipe, what = self._pipe, "the random numbers of the data in a checkpoint"
        own = text if text is not None else self._text(self._ordinary.state_dict())
        found = pipe.ranks.try_all(what, lambda: own if pipe.rank == 0 else None)
        self._state = read_states(found[pipe.replica * pipe.num_ranks].encode(), what)

    @staticmethod
    def _text(state: dict[str, Value]) -> str:
        return json.dumps(encode(state))


class _Batches(Protocol):
    def __iter__(self) -> Iterator[Value]: ...


def draw_from(numbers: DataNumbers, loader: Value) -> None:
    """Let all that a loader does for its batches draw from these numbers, from now on. It stays the same object.

    What is no loader of a class written in Python is left as it is.
    """
    kind: type[_Batches] = type(loader)
    if "data_numbers" in vars(kind):
        kind = kind.__mro__[1]
    if not hasattr(kind, "__iter__"):
        return

    class Drawing(kind):  # type: ignore[misc, valid-type]
        data_numbers = numbers

        def __iter__(self) -> Iterator[Value]:
            with numbers.drawing():
                batches = super().__iter__()
            return _Drawn(numbers, batches)

    Drawing.__name__, Drawing.__qualname__, Drawing.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    with suppress(TypeError):
        loader.__class__ = Drawing


class _Drawn(Iterator[Value]):
    """An iterator over batches."""

    def __init__(self, numbers: DataNumbers, batches: Iterator[Value]) -> None:
        self._numbers, self._batches = numbers, batches

    def __next__(self) -> Value:
        with self._numbers.drawing():
            return next(self._batches)
