"""What commands print of a timeline: the table and the figures, for people or as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from penstock.simulate import Timeline


_MOST_SHOWN: Final = 20_000  # actions that somebody may still want to scroll through


def print_timeline(timeline: Timeline, *, as_json: bool, actions: bool = False) -> None:
    """The figures as one JSON object, or a table (`actions`: the list of actions) and the figures below it."""
    if as_json:
        from penstock.show.numbers import summary

        click.echo(json.dumps(summary(timeline), indent=2))
        return
    from penstock.show.numbers import summary_text
    from penstock.show.table import show_table

    if timeline.plan.num_actions <= _MOST_SHOWN:
        show_table(timeline, actions=actions)
    else:
        click.echo(f"The table of {timeline.plan.num_actions:,} actions is left out; --html draws it, -o writes it.")
    click.echo()
    click.echo(summary_text(timeline), nl=False)
