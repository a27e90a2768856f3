"""`penstock show FILE.csv`: time a plan file and show it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from penstock.cli import shared


@click.command()
@shared.plan_file
@shared.costs
@shared.less_memory
@shared.as_json
@shared.drawings
def command(file: Path, *, limit: int, **given: Any) -> None:
    """Prove the plan in FILE.csv, time it and show it: a table, or with an option a drawing, a page or a trace.

    Times are per rank and microbatch; the file may be penstock's or torch's, with communication or without.

    \b
    Examples:
      penstock show plan.csv
      penstock show plan.csv --latency 0.1 --html plan.html --trace plan.json
    """
    from penstock.plan import check, load
    from penstock.simulate import simulate

    plan = load(file, limit=limit, name=file.stem)
    if given["recompute"] or given["offload"]:
        check(plan)  # what is changed below must be right before
    shared.show(simulate(*shared.proved(plan, given)), given)
