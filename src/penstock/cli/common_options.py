"""Options that several commands share (sizes, costs, output files), and the summaries that they print."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from penstock.plan.actions import MAX_MICROBATCH, MAX_STAGE
from penstock.plan.csv_format import LIMIT

if TYPE_CHECKING:
    from penstock.plan import Plan
    from penstock.simulate import Costs, Timeline

_Decorator = Callable[[Callable[..., object]], Callable[..., object]]
MOST_COST: Final = 1e60  # of a time or a size, as in `penstock.simulate.costs`, which is imported later
_MOST_SHOWN: Final = 20_000  # actions in the longest table that is printed
_MOST_PLANNED: Final = 5_000_000  # stages times microbatches, about ten million actions
_DIGITS: Final = len(str(MAX_STAGE))
_MOST_READ: Final = 10**12  # upper limit of --limit, in bytes
_INPUT: Final = click.Path(exists=True, dir_okay=False, readable=True, path_type=Path)
OUTPUT: Final = click.Path(dir_okay=False, writable=True, path_type=Path)
FOLDER: Final = click.Path(exists=True, file_okay=False, path_type=Path)


def _time(name: str, default: float, text: str) -> _Decorator:
    return click.option(
        name, type=click.FloatRange(min=0, max=MOST_COST), default=default, show_default=True, metavar="T", help=text
    )


def _all(*options: _Decorator) -> _Decorator:
    """Combine several options into one decorator."""
    return lambda command: reduce(lambda made, option: option(made), reversed(options), command)


def count(*names: str, text: str, default: int | None = None, most: int | None = None) -> _Decorator:
    return click.option(*names, type=click.IntRange(min=1, max=most), default=default, show_default=True, help=text)


def check_sizes(ranks: int, microbatches: int, stages_per_rank: int) -> None:
    """Raise UsageError if the plan of these sizes would not fit in memory."""
    if (size := ranks * stages_per_rank * microbatches) > _MOST_PLANNED:
        raise click.UsageError(
            f"{ranks:,} ranks x {stages_per_rank:,} stages each x {microbatches:,} microbatches are {size:,}; "
            f"expected at most {_MOST_PLANNED:,}"
        )


sizes = _all(
    count("--ranks", "-p", default=4, most=MAX_STAGE + 1, text="Number of ranks."),
    count("--microbatches", "-m", default=8, most=MAX_MICROBATCH + 1, text="Number of microbatches."),
    count(
        *("--stages-per-rank", "-v"),
        most=MAX_STAGE + 1,
        text="Stages per rank.  [default: that of the schedule]",
    ),
)
costs = _all(  # per rank and microbatch, as in the papers
    _time("--forward", 1.0, "Time of a forward."),
    _time("--backward-input", 1.0, "Time of a backward for the input gradients."),
    _time("--backward-weight", 1.0, "Time of a backward for the weight gradients."),
    _time("--latency", 0.0, "Time of a message between two ranks."),
    click.option(
        "--link",
        "links",
        multiple=True,
        metavar="A-B=T",
        help="Time of a message between ranks A and B, both ways; A>B=T for one way. Repeatable.",
    ),
    click.option(
        "--costs",
        "costs_file",
        type=_INPUT,
        metavar="FILE.json",
        help="Read all costs from a JSON file instead.",
    ),
)
less_memory = _all(
    click.option("--recompute", metavar="STAGES", help="Recompute the activations of these stages: all, or 0-3,6."),
    click.option("--offload", metavar="STAGES", help="Offload the activations of these stages: all, or 0-3,6."),
)
drawings = _all(
    click.option("--svg", type=OUTPUT, metavar="FILE", help="Write the timeline as SVG."),
    click.option("--html", type=OUTPUT, metavar="FILE", help="Write an interactive page with the timeline and memory."),
    click.option("--trace", type=OUTPUT, metavar="FILE", help="Write a trace for Perfetto or chrome://tracing."),
)
folder = click.argument("folder", type=FOLDER)
plan_file = _all(
    click.argument("file", type=_INPUT, metavar="FILE.csv"),
    count("--limit", default=LIMIT, most=_MOST_READ, text="Largest size of FILE.csv, in bytes."),
)
output = click.option(
    *("--output", "-o"),
    type=OUTPUT,
    metavar="FILE.csv",
    help="Write the plan as CSV, a format that torch also reads and writes.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print a summary as one JSON object.")


def read_costs(num_stages: int, num_ranks: int, given: dict[str, Any]) -> Costs:
    """Return the costs that the options of `costs` describe; with v stages per rank, each stage takes 1/v."""
    from dataclasses import replace

    from penstock.simulate import Costs, Link, load_costs

    names = ("forward", "backward_input", "backward_weight", "latency")
    if given["costs_file"] is None:
        times = {name: given[name] for name in names}
        costs = Costs.per_rank(num_stages=num_stages, stages_per_rank=-(-num_stages // num_ranks), **times)
    else:
        if beside := [name for name in names if was_given(name)]:
            raise click.UsageError(
                f"--{beside[0].replace('_', '-')} cannot be combined with --costs, which sets all costs; pass one of them "
                "(only --link can be combined with --costs)"
            )
        costs = load_costs(given["costs_file"])
        if costs.num_stages != num_stages:
            raise click.UsageError(
                f"{given['costs_file']} has costs of {costs.num_stages} stages, the plan {num_stages}; "
                "set --stages-per-rank, or choose another schedule"
            )
    return replace(costs, links=(*costs.links, *(link for text in given["links"] for link in Link.read(text))))


def was_given(name: str) -> bool:
    """Return True if this option is on the command line."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def stages_in_file(given: dict[str, Any], ranks: int) -> int | None:
    """Return the number of stages per rank in the file of --costs, or None without one."""
    from penstock.simulate import load_costs

    return None if given["costs_file"] is None else max(1, load_costs(given["costs_file"]).num_stages // ranks)


def proved(plan: Plan, given: dict[str, Any]) -> tuple[Plan, Costs]:
    """Apply --offload, --recompute and --lowered to a plan, check it, and return it with its costs."""
    from penstock.lower import lower, offload, recompute
    from penstock.plan import check

    costs = read_costs(plan.num_stages, plan.num_ranks, given)
    for name, change in (("offload", offload), ("recompute", recompute)):
        if given[name] is not None:
            plan = change(plan, _stages(given[name], plan.num_stages, f"--{name}"), costs=costs)
    plan = lower(plan) if given.get("lowered") else plan
    check(plan)
    return plan, costs


def _stages(written: str, num_stages: int, option: str) -> list[int] | None:
    """Parse a list of stages: ``all`` is None, ``0-3,6`` is [0, 1, 2, 3, 6]."""
    if written == "all":
        return None
    found: list[int] = []
    for part in written.split(","):
        first, dash, last = part.partition("-")
        if not first.strip().isdecimal() or (dash and not last.strip().isdecimal()):
            raise click.BadParameter(f"{written!r} is not a list of stages; pass all, or numbers such as 0-3,6")
        for number in (first, last or first):
            if len(number.strip()) > _DIGITS or int(number) >= num_stages:
                raise click.BadParameter(
                    f"{option} {written!r:.60} of a plan with {num_stages} stages; expected 0 to {num_stages - 1}"
                )
        found += range(int(first), int(last or first) + 1)
    return found


def show(timeline: Timeline, given: dict[str, Any], **more: object) -> bool:
    """Write the drawings that were requested, and print a table (with --lowered: a list of actions) and a summary.

    With --json, print the summary and `more` as one object instead. Return True if a table was printed.
    """
    from penstock.show import dump_trace, show_table, summary, summary_text, to_html, to_svg

    for name, draw in (("svg", to_svg), ("html", to_html)):
        if given[name] is not None:
            given[name].write_text(draw(timeline), encoding="utf-8")
    if given["trace"] is not None:
        dump_trace(timeline, given["trace"])
    if given.get("quiet"):
        return False
    if given["as_json"]:
        click.echo(json.dumps(summary(timeline) | more, indent=2))
        return False
    if timeline.plan.num_actions <= _MOST_SHOWN:
        show_table(timeline, actions=bool(given.get("lowered")))
    else:
        click.echo(f"The table of {timeline.plan.num_actions:,} actions is not printed; use --html or -o.")
    click.echo(f"\n{summary_text(timeline)}", nl=False)
    return True


def print_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table with one row per schedule."""
    from rich.console import Console
    from rich.table import Table

    table = Table("schedule", title=title, title_justify="left", box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)
