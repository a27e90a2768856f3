"""`penstock plan NAME`: make a plan of a schedule, time it and show it."""

from __future__ import annotations

from typing import Any

import click

from penstock.cli import shared


@click.command()
@click.argument("name")
@shared.sizes
@shared.costs
@shared.less_memory
@click.option("--lowered", is_flag=True, help="With sends and receives: all that a rank does, not only its computing.")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing, and leave out the timing unless a drawing needs it.")
@shared.as_json
@shared.output
@shared.drawings
def command(name: str, *, ranks: int, microbatches: int, stages_per_rank: int | None, **given: Any) -> None:
    """Make a plan of the schedule NAME, prove it, time it and show it. `penstock compare` lists the names.

    Times are per rank and microbatch, as in the papers: with V stages a rank each stage costs 1/V of them. The memory
    is in units of one rank's activations for one microbatch.

    \b
    Examples:
      penstock plan 1f1b --ranks 4 --microbatches 8
      penstock plan zbv -p 8 -m 24 --forward 18.5 --backward-input 18.1 --backward-weight 9.3 --latency 0.6 --json
      penstock plan gis -p 8 -m 24 -v 4 --offload 0-15 --recompute 16-31
      penstock plan interleaved1f1b --stages-per-rank 4 --lowered -o plan.csv --html plan.html
    """
    from penstock.plan import dump
    from penstock.plan.collecting import no_collecting
    from penstock.schedules import get_schedule
    from penstock.simulate import simulate

    click.get_current_context().with_resource(no_collecting())
    recipe = get_schedule(name)
    shared.check_sizes(ranks, microbatches, recipe.sizes(ranks, microbatches, stages_per_rank).stages_per_rank)
    plan, costs = shared.proved(recipe(ranks, microbatches, stages_per_rank=stages_per_rank), given)
    if given["output"] is not None:
        dump(plan, given["output"])
    if not given["quiet"] or any(given[drawing] for drawing in ("svg", "html", "trace")):
        shared.show(simulate(plan, costs), given)
