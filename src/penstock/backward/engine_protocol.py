"""The protocol of backward engines: how the forward of a microbatch is run, and what its backward does later.

A stage has one engine per microbatch. The engine runs the forward and returns a pass, which does the other actions of the
microbatch. Engines that decorate another one (recompute, offload) return passes that wrap those of the inner engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor

from penstock.nest import Value
from penstock.stage.boundary import Spec

Args: TypeAlias = tuple[Value, ...]
Kwargs: TypeAlias = dict[str, Value]
Seeds: TypeAlias = Sequence[tuple[int, Tensor]]
"""Gradients from which a backward starts, each with the position of its tensor among the roots of the forward."""


class Output(NamedTuple):
    """Result of the forward of one microbatch."""

    kept: Value = None  # what the caller keeps of it after the step
    roots: Sequence[Tensor] = ()  # the tensors that a backward may start from: all sent tensors, or the loss
    messages: Sequence[tuple[Sequence[Tensor], Spec]] = ()  # for each outbox


Run: TypeAlias = Callable[[Args, Kwargs], Output]
"""Runs the module, and the loss on the last stage, for one microbatch. May be called twice."""


class MicrobatchPass(Protocol):
    """One microbatch between its forward and the end of its backward. It has one owner, and each action runs once."""

    def backward(self, seeds: Seeds) -> None:
        """B: accumulate the gradients of inputs and parameters."""

    def backward_input(self, seeds: Seeds) -> None:
        """I: accumulate the gradients of inputs, and of parameters whose gradients cannot be deferred."""

    def backward_weight(self) -> None:
        """W: accumulate the deferred gradients of parameters."""

    def recompute(self, args: Args, kwargs: Kwargs) -> None:
        """R: run the forward again, with the arguments of the first run."""

    def offload(self) -> None:
        """O: move saved tensors to the offload target."""

    def load(self) -> None:
        """L: move them back."""


class BackwardEngine(Protocol):
    """Runs forwards such that their backwards can follow."""

    def forward(self, run: Run, args: Args, kwargs: Kwargs) -> tuple[MicrobatchPass, Output]:
        """F: run the forward of one microbatch with these arguments."""

    def begin_step(self, loss: object) -> None:
        """Prepare for a step with this loss function, which the last stage runs."""

    def end_step(self) -> None:
        """Release what only the step needed. Called after failed steps, too."""


class Wrapped:
    """A pass that hands all actions but R, O and L to `inner`; those do nothing."""

    inner: MicrobatchPass

    def __init__(self, inner: MicrobatchPass) -> None:
        self.inner = inner

    def backward(self, seeds: Seeds) -> None:
        self.inner.backward(seeds)

    def backward_input(self, seeds: Seeds) -> None:
        self.inner.backward_input(seeds)

    def backward_weight(self) -> None:
        self.inner.backward_weight()

    def recompute(self, args: Args, kwargs: Kwargs) -> None:
        """All saved tensors are still there."""

    def offload(self) -> None:
        """Saved tensors stay on the device."""

    def load(self) -> None:
        """Saved tensors have stayed on the device."""
