"""`penstock check FILE.csv`: check a plan file and report the first error in it."""

from __future__ import annotations

from pathlib import Path

import click

from penstock.cli import common_options


@click.command()
@common_options.plan_file
def command(file: Path, *, limit: int) -> None:
    """Check that the plan in FILE.csv is complete, correctly placed and ordered, and cannot deadlock.

    Exits with 0 if the plan is valid, and with 1 and the reason on stderr if it is not. A plan with communication is also
    checked with blocking sends, where a send returns only after its receive is posted; penstock does not require that.

    \b
    Example:
      penstock plan zbv --lowered -o plan.csv && penstock check plan.csv
    """
    from penstock.errors import DeadlockError
    from penstock.plan import check, load
    from penstock.show.summary import sizes

    plan = load(file, limit=limit, name=file.stem)
    check(plan)
    click.echo(f"{file}: valid. {sizes(plan)}, {plan.num_actions} actions")
    if not plan.is_lowered:
        click.echo("The plan has no communication; lowering adds it.")
        return
    try:
        check(plan, sends="blocking")
    except DeadlockError as error:
        click.echo(f"The plan needs asynchronous sends, which penstock uses: with blocking sends {error}")
    else:
        click.echo("The plan cannot deadlock, even with blocking sends.")
