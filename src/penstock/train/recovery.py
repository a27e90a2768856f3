"""Going on after a rank was lost: with how many ranks, and how long it took.

Whoever sees that a rank is gone notes since when, in the folder of the run: each rank writes a file there several times a second
as long as it lives, for `penstock top`. The next life of the run, which begins at the last checkpoint, counts from that last sign
of life to its first good step, and the report shows the seconds.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.errors import PenstockError
from penstock.run.lookout import FOLDER
from penstock.train.train_options import TrainOptions, read_json

LOSS = "lost.json"  # in the folder of the run: when the rank that is gone was there for the last time


@dataclass(frozen=True)
class Recovery:
    """A loss that the run got over."""

    step: int  # the first good one afterwards
    seconds: float  # from the last sign of life of the rank that was lost to the end of that step
    ranks: int  # that went on

    def __str__(self) -> str:
        return f"a rank was lost; step {self.step} was done {self.seconds:.1f} s later, on {self.ranks} ranks"


def note_loss(options: TrainOptions, since: float) -> None:
    """Called where a rank is found to be gone; the first word stands. ``since``: when this life of the run began."""
    with suppress(OSError), (options.folder / LOSS).open("x", encoding="utf-8") as file:
        file.write(json.dumps({"time": last_sign(options.folder, since)}))


def last_sign(folder: Path, since: float) -> float:
    """When each rank was known to live for the last time: now, or when the first of them fell silent. Files of former lives do
    not count."""
    files = [file for where in ("", "replica-*/") for file in folder.glob(f"{where}{FOLDER}/rank-*.json")]
    seen = [time.time()]
    for file in files:
        with suppress(OSError):  # a rank that ends takes its file along
            seen.append(file.stat().st_mtime)
    return min(when for when in seen if when >= since)


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
