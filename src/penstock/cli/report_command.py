"""`penstock report FOLDER`: make the page of a training run again."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def command(folder: Path) -> None:
    """Make report.html of a training run again, from the figures in its output FOLDER.

    \b
    Example:
      penstock report runs/train
    """
    from penstock.train.run_report import rewrite

    click.echo(str(rewrite(folder)))
