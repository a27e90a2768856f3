"""What a step gives: its loss, which on a device is read when somebody asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

Numbers = tuple[float | None, tuple[float, ...]]


class Result:
    """What a step gives on every rank.

        print(pipe.step(tokens, target=labels).loss)

    On an accelerator a step returns before its kernels have run, and the loss is a number there. The first look at `loss` or
    `losses` makes the host wait for it; whoever does not look does not wait. No other rank need look too.
    """

    outputs: Any  # of the model, on the ranks that asked for them

    def __init__(self, read: Callable[[], Numbers], outputs: Any = None) -> None:
        self._read = read
        self.outputs = outputs

    @classmethod
    def of(cls, loss: float | None, losses: Sequence[float], outputs: Any = None) -> Result:
        """With numbers that are known."""
        numbers = loss, tuple(losses)
        return cls(lambda: numbers, outputs)

    @cached_property
    def _numbers(self) -> Numbers:
        return self._read()

    @property
    def loss(self) -> float | None:
        """Of the whole batch; None where it was not shared."""
        return self._numbers[0]

    @property
    def losses(self) -> tuple[float, ...]:
        """Of each microbatch."""
        return self._numbers[1]

    def __repr__(self) -> str:
        return f"Result(loss={self.loss}, losses={self.losses}, outputs={self.outputs!r})"
