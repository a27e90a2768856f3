"""What a run has come to so far: kept in its checkpoints, and shown by its report."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Self

from penstock.nest import Value
from penstock.train.recovery import Recovery
from penstock.train.unpipelined import Checked

_RECENT = 20  # the steps that the speed is that of


@dataclass
class History:
    """The figures of a run, step by step.

    >>> from dataclasses import asdict
    >>> history = History(losses=[2.0, 1.5], seconds=[0.5, 0.5], validation=[(1, 1.8), (2, 1.9)])
    >>> history.speed(rows=8), history.best, history.is_enough(patience=1)
    (16.0, 1.8, True)
    >>> History.from_json(asdict(history)) == history
    True
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)  # how many steps were done, and the loss then
    saving: list[float] = field(default_factory=list)  # seconds that each checkpoint kept the steps waiting
    recoveries: list[Recovery] = field(default_factory=list)
    checked: Checked | None = None  # against the model in one process

    @classmethod
    def from_json(cls, data: dict[str, Value]) -> Self:
        """What was made of a history by `asdict`, and then read from JSON."""
        return cls(
            list(data["losses"]),
            list(data["seconds"]),
            [(step, loss) for step, loss in data["validation"]],
            list(data.get("saving", ())),
            [Recovery(**row) for row in data.get("recoveries", ())],
            Checked(**data["checked"]) if data.get("checked") else None,
        )

    def speed(self, rows: int) -> float:
        """How many rows a second the last steps have done."""
        recent = self.seconds[-_RECENT:]
        return rows * len(recent) / max(sum(recent), 1e-9)

    @property
    def best(self) -> float:
        """The lowest validation loss; infinite if there is none."""
        return min(map(_or_infinite, self.validation), default=math.inf)

    def is_enough(self, patience: int) -> bool:
        """Whether none of the last `patience` validations was better than those before them; 0: never."""
        losses = [*map(_or_infinite, self.validation)]
        return bool(patience) and len(losses) > patience and min(losses[-patience:]) >= min(losses[:-patience])


def _or_infinite(point: tuple[int, float]) -> float:
    """A loss to compare with others: one that is no number is worse than any, and not the least of all."""
    return math.inf if math.isnan(point[1]) else point[1]
