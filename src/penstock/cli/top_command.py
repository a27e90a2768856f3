"""`penstock top FOLDER`: where each rank of a running job is."""

from __future__ import annotations

import time
from pathlib import Path

import click

from penstock.cli import shared


@click.command()
@shared.folder
@click.option(
    "--watch", type=click.FloatRange(min=0.1, max=86_400), help="Show it again after so many seconds, until Ctrl-C."
)
def command(folder: Path, *, watch: float | None) -> None:
    """Show where each rank of a running job is: its action, what it waits for, from whom and for how long.

    FOLDER is the output folder of `penstock train`, or the `run_folder` of a Pipeline. `kill -USR1 PID` of a rank
    shows the same in the output of the job.

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
