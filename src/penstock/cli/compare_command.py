"""`penstock compare`: simulate all schedules with the same costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from penstock.cli import common_options


@click.command()
@common_options.sizes
@common_options.costs
@common_options.as_json
@click.option(
    *("--from", "folder"),
    type=common_options.FOLDER,
    metavar="FOLDER",
    help="Compare at the costs that the training run in FOLDER measured.",
)
def command(*, ranks: int, microbatches: int, stages_per_rank: int | None, folder: Path | None, **given: Any) -> None:
    """Simulate all schedules with the same sizes and costs, and list them by makespan.

    Times are per rank and microbatch. Without --stages-per-rank, each schedule uses its default. With --stages-per-rank, or
    with --costs, whose file sets the number of stages, only schedules that support that number are listed. Schedules without
    a backward come last. Memory is in units of the activations of one rank for one microbatch.

    \b
    Example:
      penstock compare --ranks 8 --microbatches 24 --forward 18.5 --backward-input 18.1 --backward-weight 9.3
      penstock compare --from runs/train
    """
    if folder is not None:
        _compare_measured(folder, (ranks, microbatches), stages_per_rank, as_json=given["as_json"])
        return
    from penstock.schedules import all_schedules
    from penstock.show.summary import figures, summary
    from penstock.simulate import simulate

    stages_per_rank = stages_per_rank or common_options.stages_in_file(given, ranks)
    common_options.check_sizes(ranks, microbatches, stages_per_rank or 2)
    timelines = []
    for recipe in all_schedules():
        if stages_per_rank is None or recipe.stages_per_rank in (None, stages_per_rank):
            plan = recipe(ranks, microbatches, stages_per_rank=stages_per_rank)
            timelines.append(simulate(plan, common_options.read_costs(plan.num_stages, ranks, given)))
    timelines.sort(key=lambda done: (not done.plan.has_backward, done.makespan, max(done.peak_memory)))
    if given["as_json"]:
        click.echo(json.dumps([summary(timeline) for timeline in timelines], indent=2))
        return
    headings = ("stages/rank", "makespan", "bubble:\nmakespan", "longest\nrank", "peak\nactivations")
    rows = [
        (done.plan.name, str(done.plan.num_stages // done.plan.num_ranks), *figures(done).values())
        for done in timelines
    ]
    common_options.print_table(f"{ranks} ranks, {microbatches} microbatches", headings, rows)


def _compare_measured(folder: Path, sizes: tuple[int, int], stages_per_rank: int | None, *, as_json: bool) -> None:
    """Compare schedules with the costs of a training run, and its sizes unless set; each with its own best cut."""
    from dataclasses import asdict

    from penstock.front import Choice, choose
    from penstock.front.candidates import Wishes
    from penstock.front.choice_text import tried_rows
    from penstock.train.run_report import read

    run = Choice.loads(read(folder)["choice"])
    ranks = sizes[0] if common_options.was_given("ranks") else run.plan.num_ranks
    microbatches = sizes[1] if common_options.was_given("microbatches") else run.plan.num_microbatches
    common_options.check_sizes(ranks, microbatches, stages_per_rank or 2)
    count = None if stages_per_rank is None else stages_per_rank * ranks
    found = choose(run.profile, Wishes(ranks, microbatches, num_stages=count, machine=run.machine))
    if as_json:
        click.echo(json.dumps([asdict(entry) for entry in found.tried], indent=2))
        return
    title = f"{ranks} ranks, {microbatches} microbatches, costs of {folder}"
    common_options.print_table(title, ("stages/rank", "step", "bubble", "fullest\nrank"), tried_rows(found))
