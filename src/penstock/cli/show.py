"""`penstock show FILE.csv`: time a plan file and show it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from penstock.cli import options


@click.command()
@options.plan_file
@options.limit
@options.costs
@options.less_memory
@options.as_json
@options.drawings
def command(file: Path, *, limit: int, as_json: bool, **given: Any) -> None:
    """Prove the plan in FILE.csv, time it and show it: a table, or with an option a drawing, a page or a trace.

    Times are per rank and microbatch; the file may be penstock's or torch's, with communication or without.

    \b
    Examples:
      penstock show plan.csv
      penstock show plan.csv --latency 0.1 --html plan.html --trace plan.json
    """
    from penstock.cli.figures import print_timeline
    from penstock.plan import check, load
    from penstock.simulate import simulate

    plan = load(file, limit=limit, name=file.stem)
    costs = options.costs_of(plan, given)
    plan = options.holding_less(plan, costs, given)
    check(plan)
    timeline = simulate(plan, costs)
    options.write_drawings(timeline, svg=given["svg"], html=given["html"], trace=given["trace"])
    print_timeline(timeline, as_json=as_json)
