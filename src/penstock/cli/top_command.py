"""`penstock top FOLDER`: show the position of each rank of a running job."""

from __future__ import annotations

import time
from pathlib import Path

import click

from penstock.cli import common_options


@click.command()
@common_options.folder
@click.option(
    "--watch",
    type=click.FloatRange(min=0.1, max=86_400),
    metavar="SECONDS",
    help="Refresh every SECONDS until Ctrl-C.",
)
def command(folder: Path, *, watch: float | None) -> None:
    """Show the position of each rank of a running job: its action, what it waits for, from which rank and for how long.

    FOLDER is the output folder of `penstock train`, or the `run_folder` of a Pipeline. `kill -USR1 PID` of a
    rank prints the same to the output of the job.

    \b
    Example:
      penstock top runs/train
    """
    from penstock.run.lookout import read_folder

    while True:
        click.echo(read_folder(folder))
        if watch is None:
            return
        time.sleep(watch)
        click.echo()
