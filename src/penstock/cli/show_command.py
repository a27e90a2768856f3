"""`penstock show FILE.csv`: simulate a plan file and show it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from penstock.cli import common_options


@click.command()
@common_options.plan_file
@common_options.costs
@common_options.less_memory
@common_options.as_json
@common_options.drawings
def command(file: Path, *, limit: int, **given: Any) -> None:
    """Check the plan in FILE.csv, simulate it and show it as a table, a drawing, a page or a trace.

    Times are per rank and microbatch. The file may come from penstock or torch, with or without communication.

    \b
    Examples:
      penstock show plan.csv
      penstock show plan.csv --latency 0.1 --html plan.html --trace plan.json
    """
    from penstock.plan import check, load
    from penstock.simulate import simulate

    plan = load(file, limit=limit, name=file.stem)
    if given["recompute"] or given["offload"]:
        check(plan)  # before it is changed below
    common_options.show(simulate(*common_options.proved(plan, given)), given)
