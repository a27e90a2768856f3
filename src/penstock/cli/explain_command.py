"""`penstock explain FOLDER`: where the time of a measured step went, and what else could be done."""

from __future__ import annotations

from pathlib import Path

import click

from penstock.cli import shared


@click.command()
@shared.folder
def command(folder: Path) -> None:
    """Say where the time of a training run's steps goes, by replaying a measured one with parts replaced.

    Each rank, stage and link that is slower than its peers, the cut, the schedule, messages and microbatches of unequal
    length: with the seconds that they cost, the most first. Then what other schedules, more microbatches and more ranks
    would give. FOLDER is the output folder of `penstock train`.

    \b
    Example:
      penstock explain runs/train
    """
    from penstock.train.run_report import explain

    click.echo(explain(folder), nl=False)
