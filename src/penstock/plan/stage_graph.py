"""StageGraph: which stage feeds which."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from penstock.checks import check_types, entry
from penstock.errors import PlanError


@dataclass(frozen=True)
class StageGraph:
    """Which stage feeds which: a chain, unless the model has skip connections.

    >>> StageGraph.chain(3).producers(2)
    (1,)
    >>> StageGraph.chain(4, skips=[(0, 3)]).producers(3)
    (0, 2)
    """

    num_stages: int
    edges: tuple[tuple[int, int], ...]  # (producer, consumer), sorted, producer < consumer

    def __post_init__(self) -> None:
        try:
            if self.num_stages < 1:
                raise PlanError(f"a stage graph of {self.num_stages} stages; expected at least one")
            for producer, consumer in self.edges:
                if not 0 <= producer < consumer < self.num_stages:
                    raise PlanError(
                        f"edge {producer} -> {consumer} in a graph of {self.num_stages} stages; "
                        f"expected 0 <= producer < consumer < {self.num_stages}: values flow to later stages only"
                    )
        except Exception:
            edges = (self.edges, tuple[tuple[int, int], ...])
            check_types("StageGraph", PlanError, num_stages=(self.num_stages, int), edges=edges)
            raise

    @classmethod
    def chain(cls, num_stages: int, skips: Iterable[tuple[int, int]] = ()) -> StageGraph:
        """Each stage feeds the next, plus the given skip connections."""
        check_types("StageGraph.chain", PlanError, num_stages=(num_stages, int), skips=(skips, Iterable))
        return cls.of(num_stages, [*((s, s + 1) for s in range(num_stages - 1)), *skips])

    @classmethod
    def of(cls, num_stages: int, edges: Iterable[tuple[int, int]]) -> StageGraph:
        """Exactly these edges."""
        try:
            return cls(num_stages, tuple(sorted(set(edges))))
        except TypeError:
            check_types("StageGraph.of", PlanError, edges=(edges, Iterable[tuple[int, int]]))
            raise

    def producers(self, stage: int) -> tuple[int, ...]:
        return entry(self._neighbours[0], stage, "producers(stage")

    def consumers(self, stage: int) -> tuple[int, ...]:
        return entry(self._neighbours[1], stage, "consumers(stage")

    @cached_property
    def _neighbours(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """By stage, its producers; and by stage, its consumers."""
        producers, consumers = ([list[int]() for _ in range(self.num_stages)] for _ in range(2))
        for producer, consumer in self.edges:
            producers[consumer].append(producer)
            consumers[producer].append(consumer)
        return tuple(map(tuple, producers)), tuple(map(tuple, consumers))
