"""Routes: which outputs of which stages a captured stage reads, and how it calls its module with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from penstock.nest import Value


class Routes(Protocol):
    """What a captured stage knows of the whole model. A hand-made stage has none: it reads all that the one before gives."""

    @property
    def edges(self) -> Iterable[tuple[int, int]]:
        """(producer, consumer) for every pair of stages between which something travels."""

    @property
    def wires(self) -> str:
        """All that travels, in one line that ranks compare before their first step."""

    @property
    def model(self) -> str:
        """What all stages of the model hold, in a few words that ranks compare before their first step."""

    @property
    def has_loss(self) -> bool:
        """Whether the model returns its own loss."""

    def loss_of(self, output: object) -> Value:
        """The model's own loss, out of what the model returned."""

    @property
    def ties(self) -> Iterable[Sequence[tuple[int, str]]]:
        """The holders, (stage, name), of each parameter that several stages use, the owner first."""

    def wanted_on(self, producer: int, consumers: Iterable[int]) -> tuple[int, ...]:
        """Which of the producer's outputs these stages read, by their place, in order."""

    @property
    def sources(self) -> Sequence[tuple[int | None, int]]:
        """Where each argument of this stage's module comes from: (producer, which of its outputs), or (None, 0) for an
        argument of the model."""

    def bind(
        self, args: Sequence[tuple[object, ...]] | None, kwargs: Sequence[dict[str, object]], num_microbatches: int
    ) -> Sequence[Sequence[Value]]:
        """For each microbatch the arguments of this stage's module, with None where another stage's value goes."""
