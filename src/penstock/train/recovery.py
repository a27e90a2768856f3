"""Going on after a rank was lost: with how many ranks, and how long it took.

A rank that sees that another one is gone notes when, in the folder of the run. The next life of the run, which begins at the last
checkpoint, counts from there to its first good step, and the report shows the seconds.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError
from penstock.train.train_options import TrainOptions, read_json

LOSS = "lost.json"  # in the folder of the run: when the first rank noticed that another one was gone


@dataclass(frozen=True)
class Recovery:
    """A loss that the run got over."""

    step: int  # the first good one afterwards
    seconds: float  # from when a rank was found to be gone to the end of that step
    ranks: int  # that went on

    def __str__(self) -> str:
        return f"a rank was lost; step {self.step} was done {self.seconds:.1f} s later, on {self.ranks} ranks"


def note_loss(options: TrainOptions) -> None:
    """Called on a rank that ends because another one is gone; the first one's word stands."""
    with suppress(OSError), (options.folder / LOSS).open("x", encoding="utf-8") as file:
        file.write(json.dumps({"time": time.time()}))


def loss_noted(folder: Path) -> float | None:
    """When a rank was lost, if the life before this one ended so; None else. It is told once."""
    file = folder / LOSS
    if not file.is_file():
        return None
    when = read_json(file).get("time")
    file.unlink(missing_ok=True)
    return float(when) if isinstance(when, int | float) else None


def to_json(recoveries: list[Recovery]) -> list[dict[str, Any]]:
    return [asdict(one) for one in recoveries]


def from_json(rows: list[dict[str, Any]]) -> list[Recovery]:
    return [Recovery(**row) for row in rows]


def fitted(options: TrainOptions, ranks: int) -> TrainOptions:
    """The options for the ranks that there are now: a number of stages that does not suit them is chosen anew.

    >>> fitted(TrainOptions(ranks=3, stages=3, min_ranks=2), 2).stages is None
    True
    """
    if ranks < options.min_ranks:
        raise PenstockError(f"{ranks} ranks are left, and --min-ranks {options.min_ranks} were asked for; the run ends")
    if options.min_ranks and options.stages is not None and options.stages % ranks:
        return replace(options, stages=None)
    return options
