"""What commands print of a timeline: the table and the figures, for people or as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from penstock.simulate import Timeline


def print_timeline(timeline: Timeline, *, as_json: bool, actions: bool = False) -> None:
    """The figures as one JSON object, or a table (`actions`: the list of actions) and the figures below it."""
    if as_json:
        from penstock.show.numbers import summary

        click.echo(json.dumps(summary(timeline), indent=2))
        return
    from penstock.show.numbers import summary_text
    from penstock.show.table import show_table

    show_table(timeline, actions=actions)
    click.echo()
    click.echo(summary_text(timeline), nl=False)
