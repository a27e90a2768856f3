"""Parameters of hand-made stages that are one parameter.

tie([(0, "embed.weight"), (3, "head.weight")])
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from penstock.errors import CaptureError


@dataclass(frozen=True)
class Tie:
    """One logical parameter: the first holder owns it, all are kept equal and their gradients are summed."""

    holders: tuple[tuple[int, str], ...]  # (stage, name in that stage)

    @property
    def owner(self) -> tuple[int, str]:
        return self.holders[0]


def tie(holders: Iterable[tuple[int, str]]) -> Tie:
    """Say that parameters of several stages are one: ``tie([(0, "embed.weight"), (3, "head.weight")])``."""
    found = tuple(sorted((int(stage), str(name)) for stage, name in holders))
    if len({stage for stage, _ in found}) < 2:
        raise CaptureError(
            f"tie takes parameters of at least two stages, got {list(found)}; write [(0, 'a.weight'), (3, 'b.weight')]"
        )
    return Tie(found)


def find_ties(stages: Sequence[nn.Module]) -> tuple[Tie, ...]:
    """Parameters that several stages of one process hold as one object."""
    holders: dict[int, list[tuple[int, str]]] = {}
    for k, stage in enumerate(stages):
        for name, value in stage.named_parameters():
            holders.setdefault(id(value), []).append((k, name))
    return tuple(Tie(tuple(found)) for found in holders.values() if len(found) > 1)
