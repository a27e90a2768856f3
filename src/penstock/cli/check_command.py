"""`penstock check FILE.csv`: prove that a plan file is right, or say what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import click

from penstock.cli import shared


@click.command()
@shared.plan_file
def command(file: Path, *, limit: int) -> None:
    """Prove that the plan in FILE.csv is complete, well placed, well ordered and cannot deadlock.

    Exits with 0 if it is, and with 1 and the reason on stderr if it is not. A plan with communication is also tried
    with blocking sends, as if each rank stayed in a send until its receive is posted; penstock does not need that.

    \b
    Example:
      penstock plan zbv --lowered -o plan.csv && penstock check plan.csv
    """
    from penstock.errors import DeadlockError
    from penstock.plan import check, load
    from penstock.show.numbers import sizes

    plan = load(file, limit=limit, name=file.stem)
    check(plan)
    click.echo(f"{file}: right. {sizes(plan)}, {plan.num_actions} actions")
    if not plan.is_lowered:
        click.echo("It holds no communication; lowering adds it.")
        return
    try:
        check(plan, sends="blocking")
    except DeadlockError as error:
        click.echo(f"It needs asynchronous sends, as penstock's are: with blocking sends {error}")
    else:
        click.echo("It cannot deadlock, even with blocking sends.")
