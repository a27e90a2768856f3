"""Placement: which rank holds which stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from penstock.checks import check_types, entry
from penstock.errors import PlanError


@dataclass(frozen=True)
class Placement:
    """Which rank holds which stage.

    >>> Placement.loop(2, 2).ranks
    (0, 1, 0, 1)
    >>> Placement.v(2).ranks
    (0, 1, 1, 0)
    >>> Placement.v(2).stages_of(0)
    (0, 3)
    """

    ranks: tuple[int, ...]  # the rank of each stage

    def __post_init__(self) -> None:
        try:
            used = set(self.ranks)
        except TypeError:
            check_types("Placement", PlanError, ranks=(self.ranks, tuple[int, ...]))
            raise
        if not used or used != set(range(len(used))):
            raise PlanError(
                f"placement {self.ranks} leaves a rank without a stage; "
                "expected every rank from 0 to the highest at least once"
            )

    @classmethod
    def loop(cls, num_ranks: int, stages_per_rank: int = 1) -> Placement:
        """Stages go round the ranks: 0, 1, .., p-1, 0, 1, .."""
        _positive(num_ranks, stages_per_rank)
        return cls(tuple(range(num_ranks)) * stages_per_rank)

    @classmethod
    def v(cls, num_ranks: int, stages_per_rank: int = 2) -> Placement:
        """Stages go there and back: 0, 1, .., p-1, p-1, .., 1, 0, .."""
        _positive(num_ranks, stages_per_rank)
        there = tuple(range(num_ranks))
        return cls(tuple(rank for leg in range(stages_per_rank) for rank in there[:: -1 if leg % 2 else 1]))

    @classmethod
    def of(cls, ranks: Sequence[int]) -> Placement:
        """Any placement: the rank of each stage, in the order of stages."""
        check_types("Placement.of", PlanError, ranks=(ranks, Iterable))
        return cls(tuple(ranks))

    @property
    def num_stages(self) -> int:
        return len(self.ranks)

    @cached_property
    def num_ranks(self) -> int:
        return max(self.ranks) + 1

    def rank_of(self, stage: int) -> int:
        return entry(self.ranks, stage, "rank_of(stage")

    @cached_property
    def _stages(self) -> tuple[tuple[int, ...], ...]:
        stages: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for stage, rank in enumerate(self.ranks):
            stages[rank].append(stage)
        return tuple(map(tuple, stages))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return entry(self._stages, rank, "stages_of(rank")

    @property
    def kind(self) -> str:
        """``loop``, ``v`` or ``custom``."""
        sizes = self.num_ranks, self.num_stages // self.num_ranks
        known = {Placement.v(*sizes): "v", Placement.loop(*sizes): "loop"}  # with one stage a rank both are the same
        return known.get(self, "custom")


def _positive(num_ranks: int, stages_per_rank: int) -> None:
    check_types("Placement", PlanError, num_ranks=(num_ranks, int), stages_per_rank=(stages_per_rank, int))
    if num_ranks < 1 or stages_per_rank < 1:
        raise PlanError(f"got {num_ranks} ranks and {stages_per_rank} stages a rank; expected at least one of each")
