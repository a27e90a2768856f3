"""`penstock plan NAME`: build the plan of a schedule, simulate it and show it."""

from __future__ import annotations

from typing import Any

import click

from penstock.cli import common_options


@click.command()
@click.argument("name")
@common_options.sizes
@common_options.costs
@common_options.less_memory
@click.option("--lowered", is_flag=True, help="Include sends and receives, in addition to computation.")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing; simulate only if a drawing needs it.")
@common_options.as_json
@common_options.output
@common_options.drawings
def command(name: str, *, ranks: int, microbatches: int, stages_per_rank: int | None, **given: Any) -> None:
    """Build the plan of the schedule NAME, check it, simulate it and show it. `penstock compare` lists the names.

    Times are per rank and microbatch, as in the papers: with V stages per rank, each stage takes 1/V of them. Memory is in
    units of the activations of one rank for one microbatch.

    \b
    Examples:
      penstock plan 1f1b --ranks 4 --microbatches 8
      penstock plan zbv -p 8 -m 24 --forward 18.5 --backward-input 18.1 --backward-weight 9.3 --latency 0.6 --json
      penstock plan gis -p 8 -m 24 -v 4 --offload 0-15 --recompute 16-31
      penstock plan interleaved1f1b --stages-per-rank 4 --lowered -o plan.csv --html plan.html
    """
    from penstock.plan import dump
    from penstock.plan.disable_gc import no_collecting
    from penstock.schedules import get_schedule
    from penstock.simulate import simulate

    click.get_current_context().with_resource(no_collecting())
    recipe = get_schedule(name)
    common_options.check_sizes(ranks, microbatches, recipe.sizes(ranks, microbatches, stages_per_rank).stages_per_rank)
    plan, costs = common_options.proved(recipe(ranks, microbatches, stages_per_rank=stages_per_rank), given)
    if given["output"] is not None:
        dump(plan, given["output"])
    if not given["quiet"] or any(given[drawing] for drawing in ("svg", "html", "trace")):
        common_options.show(simulate(plan, costs), given)
