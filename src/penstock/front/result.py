"""What a step gives: its loss, which on a device is read when somebody asks for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from penstock.nest import Value

Numbers = tuple[float | None, tuple[float, ...]]


@dataclass(frozen=True)
class Told:
    """What all ranks know after a step."""

    read: Callable[
        [], Numbers
    ]  # the loss of the batch and of each microbatch; on a device the host waits for them here
    overflow: Tensor | None  # more than 0 if gradients overflowed on any rank; None: nobody asked


class Result:
    """What a step gives on every rank.

        print(pipe.step(tokens, target=labels).loss)

    On an accelerator a step returns before its kernels have run, and the loss is a number there. The first look at `loss` or
    `losses` makes the host wait for it; whoever does not look does not wait. No other rank need look too.
    """

    outputs: Value  # of the model, on the ranks that asked for them

    def __init__(self, read: Callable[[], Numbers], outputs: Value = None) -> None:
        self._read = read
        self.outputs = outputs

    @cached_property
    def _numbers(self) -> Numbers:
        return self._read()

    @property
    def loss(self) -> float | None:
        """The loss of the whole batch; None where it was not shared."""
        return self._numbers[0]

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss of each microbatch."""
        return self._numbers[1]

    def __repr__(self) -> str:
        return f"Result(loss={self.loss}, losses={self.losses}, outputs={self.outputs!r})"
