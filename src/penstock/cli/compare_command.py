"""`penstock compare`: all schedules side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli import shared

if TYPE_CHECKING:
    from penstock.simulate import Timeline


@click.command()
@shared.sizes
@shared.costs
@shared.as_json
@click.option(
    "--from",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Compare at the costs that the training run in FOLDER measured.",
)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    ranks: int,
    microbatches: int,
    stages_per_rank: int | None,
    as_json: bool,
    folder: Path | None,
    **given: object,
) -> None:
    """Time all schedules with the same sizes and costs: a table, the shortest makespan first.

    Times are per rank and microbatch; without --stages-per-rank each schedule gets the number that suits it, with it
    (or with --costs, whose file says how many stages there are) only those that allow that number are compared. What has
    no backward comes last. The memory is in units of one rank's activations for one microbatch.

    \b
    Example:
      penstock compare --ranks 8 --microbatches 24 --forward 18.5 --backward-input 18.1 --backward-weight 9.3
      penstock compare --from runs/train
    """
    if folder is not None:
        default = click.core.ParameterSource.DEFAULT
        sizes = {"num_ranks": ranks, "num_microbatches": microbatches}
        chosen = {k: v for k, v in sizes.items() if ctx.get_parameter_source(k.removeprefix("num_")) is not default}
        _compare_measured(folder, chosen, stages_per_rank, as_json=as_json)
        return
    from penstock.schedules import all_schedules
    from penstock.show.numbers import summary
    from penstock.simulate import simulate

    stages_per_rank = stages_per_rank or shared.stages_in_file(given, ranks)
    timelines = []
    for recipe in all_schedules():
        if stages_per_rank is not None and recipe.stages_per_rank not in (None, stages_per_rank):
            continue
        plan = recipe(ranks, microbatches, stages_per_rank=stages_per_rank)
        timelines.append(simulate(plan, shared.costs_of(plan, given)))
    timelines.sort(key=lambda done: (not done.plan.has_backward, done.makespan, max(done.peak_memory)))
    if as_json:
        click.echo(json.dumps([summary(timeline) for timeline in timelines], indent=2))
    else:
        _print_table(timelines, f"{ranks} ranks, {microbatches} microbatches")


def _compare_measured(folder: Path, sizes: dict[str, int], stages_per_rank: int | None, *, as_json: bool) -> None:
    """All schedules at the costs of a training run, each cut where it is best for it."""
    from dataclasses import asdict

    from penstock.balance.cuts import size_text
    from penstock.front import Choice, choose
    from penstock.front.candidates import Wishes
    from penstock.show.numbers import percent, time_text
    from penstock.train.run_report import read

    run = Choice.loads(read(folder)["choice"])
    wanted = {"num_ranks": run.plan.num_ranks, "num_microbatches": run.plan.num_microbatches, **sizes}
    count = None if stages_per_rank is None else stages_per_rank * wanted["num_ranks"]
    wishes = Wishes(wanted["num_ranks"], wanted["num_microbatches"], num_stages=count, machine=run.machine)
    tried = choose(run.profile, wishes).tried
    if as_json:
        click.echo(json.dumps([asdict(entry) for entry in tried], indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    title = f"{wanted['num_ranks']} ranks, {wanted['num_microbatches']} microbatches, costs of {folder}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("schedule")
    for heading in ("stages/rank", "step", "bubble", "fullest\nrank"):
        table.add_column(heading, justify="right")
    for entry in tried:
        if entry.makespan is None:
            table.add_row(entry.schedule, str(entry.stages_per_rank), "-", "-", entry.why.splitlines()[0])
        else:
            figures = (time_text(entry.makespan, "s"), percent(entry.bubble), size_text(entry.memory))
            table.add_row(entry.schedule, str(entry.stages_per_rank), *figures)
    Console(highlight=False).print(table)


def _print_table(timelines: list[Timeline], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from penstock.show.numbers import memory_text, percent, time_text

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("schedule")
    for heading in ("stages/rank", "makespan", "bubble:\nmakespan", "longest\nrank", "peak\nactivations"):
        table.add_column(heading, justify="right")
    for timeline in timelines:
        plan = timeline.plan
        table.add_row(
            plan.name,
            str(plan.num_stages // plan.num_ranks),
            time_text(timeline.makespan),
            percent(timeline.bubble_makespan),
            percent(timeline.bubble_longest_rank),
            memory_text(max(timeline.peak_memory)),
        )
    Console(highlight=False).print(table)
