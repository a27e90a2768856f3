"""Going on after a rank was lost: with how many ranks, and how long it took.

A rank that sees that another one is gone notes when, in the folder of the run. The next life of the run, which begins at the last
checkpoint, counts from there to its first good step, and the report shows the seconds.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

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


def spread_over(options: TrainOptions, ranks: int, *, all_of_them: bool = False) -> tuple[int, int]:
    """Replicas, and ranks of each, for the ranks that are left: (0, 0) if --min-ranks do not remain for a pipeline.

    Replicas are given up only if the pipelines would be shorter than --min-ranks otherwise, and so many that the rows of a
    batch come out even. `all_of_them`: no rank may be left over.

    >>> four = TrainOptions(ranks=2, dp=2, min_ranks=1)
    >>> spread_over(four, 3), spread_over(replace(four, min_ranks=2), 3), spread_over(replace(four, min_ranks=2), 1)
    ((2, 1), (1, 2), (0, 0))
    """
    for replicas in range(options.dp, 0, -1):
        each = min(options.ranks, ranks // replicas)
        whole = each * replicas == ranks or not all_of_them
        if each >= max(options.min_ranks, 1) and options.dp % replicas == 0 and whole:
            return replicas, each
    return 0, 0


def fitted(options: TrainOptions, ranks: int) -> TrainOptions:
    """The options for the ranks that there are now: replicas, and stages that do not suit them, are chosen anew.

    >>> fitted(TrainOptions(ranks=3, stages=3, min_ranks=2), 2).stages is None
    True
    >>> fitted(TrainOptions(ranks=2, dp=2, min_ranks=2), 2).dp
    1
    """
    if not options.min_ranks:
        return options
    grown = replace(options, ranks=max(options.ranks, ranks))  # under torchrun a pipeline has the ranks that there are
    replicas, each = spread_over(grown, ranks, all_of_them=True)
    if not replicas:
        raise PenstockError(
            f"{ranks} ranks are left{f' for --dp {options.dp} replicas or fewer' if options.dp > 1 else ''}, and --min-ranks "
            f"{options.min_ranks} were asked for; the run ends"
        )
    fits = options.stages is None or options.stages % each == 0
    return replace(options, dp=replicas, stages=options.stages if fits else None)
