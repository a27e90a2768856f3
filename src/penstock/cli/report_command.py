"""`penstock report FOLDER`: regenerate the report of a training run."""

from __future__ import annotations

from pathlib import Path

import click

from penstock.cli import common_options


@click.command()
@common_options.folder
@click.option(
    "--costs",
    type=common_options.OUTPUT,
    metavar="FILE.json",
    help="Write the measured costs of stages, messages and microbatches, for --costs of plan, compare and search.",
)
def command(folder: Path, *, costs: Path | None) -> None:
    """Regenerate report.html of a training run from the measurements in its output FOLDER.

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
