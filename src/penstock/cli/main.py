"""The `penstock` command. A subcommand is one line in `COMMANDS`, and a file with a click command called `command`."""

from __future__ import annotations

import select
import sys
from difflib import get_close_matches
from importlib import import_module
from typing import Final

import click

from penstock import __version__
from penstock.errors import PenstockError

# name -> its module, and its line in `penstock --help`. Modules are imported when their command is called, not before.
COMMANDS: Final = {
    "train": ("penstock.cli.train_command", "Train over pipelined processes, with a report at the end."),
    "top": ("penstock.cli.top_command", "Show the position of each rank of a running job."),
    "report": ("penstock.cli.report_command", "Regenerate the report of a training run."),
    "explain": ("penstock.cli.explain_command", "Attribute the step time of a run, and list possible improvements."),
    "plan": ("penstock.cli.plan_command", "Build the plan of a schedule, simulate it and show it."),
    "compare": ("penstock.cli.compare_command", "Simulate all schedules with the same costs."),
    "search": ("penstock.cli.search_command", "Search for a schedule for given costs and a memory limit."),
    "check": ("penstock.cli.check_command", "Check a plan file and report the first error in it."),
    "show": ("penstock.cli.show_command", "Simulate a plan file and show it."),
    "studio": ("penstock.cli.studio_command", "Plan interactively in a browser."),
}


def _is_unread() -> bool:
    """Return True if standard output is a pipe whose reader is gone."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)  # errors are always reported
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError):  # standard output is not a file
        return False


class _Commands(click.Group):
    """Command group that imports commands on first use and prints penstock's errors as one line on stderr."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name.startswith("-"):  # click reports the unknown option
            return None
        if cmd_name not in COMMANDS:
            close = get_close_matches(cmd_name, COMMANDS, n=1)
            meant = f"Did you mean {close[0]!r}? " if close else ""
            ctx.fail(f"No such command {cmd_name!r}. {meant}Commands: {', '.join(COMMANDS)}")
        command: click.Command = import_module(COMMANDS[cmd_name][0]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except (PenstockError, OSError) as error:
            if isinstance(error, BrokenPipeError) and _is_unread():
                raise  # `penstock plan ... | head -1`: click exits silently
            raise click.ClickException(str(error)) from error


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="penstock")
def main() -> None:
    """Plan, check, simulate and run pipeline-parallel training.

    \b
    Examples:
      penstock train --ranks 2 --steps 300
      penstock plan zbv --ranks 4 --microbatches 8
      penstock compare --ranks 8 --microbatches 24 --latency 0.1
      penstock plan 1f1b --lowered -o plan.csv && penstock check plan.csv
    """
