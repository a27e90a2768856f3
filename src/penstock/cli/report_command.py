"""`penstock report FOLDER`: make the page of a training run again."""

from __future__ import annotations

from pathlib import Path

import click

from penstock.cli import shared


@click.command()
@shared.folder
@click.option(
    "--costs",
    type=shared.OUTPUT,
    metavar="FILE.json",
    help="Write what its stages, messages and microbatches cost as measured, for --costs of plan, compare and search.",
)
def command(folder: Path, *, costs: Path | None) -> None:
    """Make report.html of a training run again, from the figures in its output FOLDER.

    \b
    Examples:
      penstock report runs/train
      penstock report runs/train --costs costs.json
    """
    from penstock.train.run_report import costs_of_run, rewrite

    if costs is not None:
        from penstock.simulate import dump_costs

        dump_costs(costs_of_run(folder), costs)
    click.echo(str(rewrite(folder)))
