"""`penstock compare`: all schedules side by side."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from penstock.cli import options

if TYPE_CHECKING:
    from penstock.simulate import Timeline


@click.command()
@options.sizes
@options.costs
@options.as_json
def command(*, ranks: int, microbatches: int, stages_per_rank: int | None, as_json: bool, **given: Any) -> None:
    """Time all schedules with the same sizes and costs: a table, the shortest makespan first.

    Times are per rank and microbatch; without --stages-per-rank each schedule gets the number that suits it, with it
    only those that allow that number are compared. What has no backward comes last. The memory is in units of one
    rank's activations for one microbatch.

    \b
    Example:
      penstock compare --ranks 8 --microbatches 24 --forward 18.5 --backward-input 18.1 --backward-weight 9.3
    """
    from penstock.schedules import all_schedules
    from penstock.show.numbers import summary
    from penstock.simulate import simulate

    timelines = []
    for recipe in all_schedules():
        if stages_per_rank is not None and recipe.stages_per_rank not in (None, stages_per_rank):
            continue
        plan = recipe(ranks, microbatches, stages_per_rank=stages_per_rank)
        timelines.append(simulate(plan, options.costs_of(plan, given)))
    timelines.sort(key=lambda done: (not done.plan.has_backward, done.makespan, max(done.peak_memory)))
    if as_json:
        click.echo(json.dumps([summary(timeline) for timeline in timelines], indent=2))
    else:
        _print_table(timelines, f"{ranks} ranks, {microbatches} microbatches")


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
