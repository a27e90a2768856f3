"""`penstock explain FOLDER`: attribute the time of a measured step, and list possible improvements."""

from __future__ import annotations

from pathlib import Path

import click

from penstock.cli import common_options


@click.command()
@common_options.folder
def command(folder: Path) -> None:
    """Attribute the step time of a training run, by simulating a measured step with parts replaced.

    Lists slow ranks, stages and links, the cut, the schedule, messages and microbatches of unequal length with the seconds
    that each costs, largest first; then the predicted step time with other schedules, more microbatches and more ranks.

    FOLDER is the output folder of `penstock train`.

    \b
    Example:
      penstock explain runs/train
    """
    from penstock.train.run_report import explain

    click.echo(explain(folder), nl=False)
