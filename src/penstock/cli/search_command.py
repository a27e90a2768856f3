"""`penstock search`: search for a schedule for given costs and a memory limit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import click

from penstock.cli import common_options

if TYPE_CHECKING:
    from penstock.search import Searched
    from penstock.simulate import Costs

_STAGES_PER_RANK: Final = (1, 2, 4)  # tried by default
_EFFORT: Final = 3_000_000  # actions to place by default: about 10 s
_FIRST: Final = 0.15  # share of the tries for each number of stages per rank, if there are several


@click.command()
@common_options.sizes
@common_options.costs
@click.option(
    "--memory",
    type=click.FloatRange(min=0, max=common_options.MOST_COST),
    metavar="N",
    help="Memory of each rank, in units of its activations for one microbatch.  [default: no limit]",
)
@click.option(
    "--placement", type=click.Choice(["loop", "v"]), help="Assignment of stages to ranks.  [default: both are tried]"
)
@common_options.count(
    "--tries", most=10**9, text="Number of schedules to build and simulate.  [default: about 10 s of work]"
)
@click.option(
    "--exact",
    type=click.FloatRange(min=0, min_open=True),
    metavar="N",
    help="Refine the result with an exact solver and prove a bound; N scales its effort (a few seconds per unit and "
    "placement). Requires penstock[solver].",
)
@click.option(
    "--front", "whole_front", is_flag=True, help="Search with a dozen memory limits and list makespan by memory."
)
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same schedule.")
@common_options.as_json
@common_options.output
@common_options.drawings
def command(*, ranks: int, microbatches: int, stages_per_rank: int | None, whole_front: bool, **given: Any) -> None:
    """Search for the fastest schedule for these costs in which no rank uses more than --memory.

    Times are per rank and microbatch, as in the papers: with V stages per rank, each stage takes 1/V of them. Without
    --stages-per-rank, 1, 2 and 4 are tried and the search continues with the best. The result has a lower bound for all
    schedules with the same number of stages and memory; a gap of 0% proves that the schedule is optimal. --front lists the
    Pareto front of memory and makespan together with all known schedules, with two stages per rank by default; --svg and
    --html draw it. With --exact, CP-SAT of OR-Tools starts from the best schedule found: it can improve the schedule and
    raise the bound, and solves small problems to optimality.

    \b
    Examples:
      penstock search -p 8 -m 24 -v 4 --memory 16 --forward 18.5 --backward-input 18.1 --backward-weight 9.3
      penstock search --memory 8 -o plan.csv --html plan.html
      penstock search -p 8 -m 24 -v 2 --front --html front.html
      penstock search -p 3 -m 4 -v 1 --memory 2 --tries 50 --exact 2
    """
    per_rank = stages_per_rank or common_options.stages_in_file(given, ranks)
    common_options.check_sizes(ranks, microbatches, per_rank or max(_STAGES_PER_RANK))
    if not whole_front:
        _search(ranks, microbatches, per_rank, given)
    elif any(given[name] is not None for name in ("memory", "output", "trace")):
        raise click.UsageError("--front searches many limits; leave out --memory, --output and --trace")
    else:
        _front(ranks, microbatches, per_rank or 2, given)


def _search(ranks: int, microbatches: int, per_rank: int | None, given: dict[str, Any]) -> None:
    """Print and draw the best schedule; on a terminal, show progress."""
    from rich.console import Console

    from penstock.plan import dump
    from penstock.search import search
    from penstock.show.summary import percent, time_text

    with Console(stderr=True).status("searching") as shown:

        def progress(done: int, best: Searched) -> None:
            shown.update(f"{done} better ones, shortest {best.makespan:.6g}, gap {best.gap:.1%}")

        def searched(each: int, share: float, exact: float | None = None) -> Searched:
            costs, wishes = _asked(ranks, microbatches, each, given | {"exact": exact}, limits=3)
            wishes |= {"tries": max(1, round(wishes["tries"] * share)), "memory_limit": given["memory"]}
            return search(ranks, microbatches, costs, progress=progress, **wishes)

        if per_rank is None:
            per_rank = min(_STAGES_PER_RANK, key=lambda each: searched(each, _FIRST).makespan)
        found = searched(per_rank, 1.0, given["exact"])
    if given["output"] is not None:
        dump(found.plan, given["output"])
    if common_options.show(found.timeline, given, floor=found.floor, gap=found.gap, origin=found.origin):
        best = "optimal" if found.gap < 1e-9 else f"within {percent(found.gap)} of optimal"
        known = "" if found.origin in ("search", "solver") else f"; it is the known schedule {found.origin}"
        click.echo(f"lower bound {time_text(found.floor)}: this schedule is {best}{known}")


def _asked(
    ranks: int, microbatches: int, each: int, given: dict[str, Any], *, limits: int
) -> tuple[Costs, dict[str, Any]]:
    """Return the costs with `each` stages per rank, and the other arguments of `limits` searches."""
    costs = common_options.read_costs(ranks * each, ranks, given)
    tries = given["tries"] or max(50, _EFFORT // (limits * costs.num_stages * microbatches))
    return costs, {"tries": tries, **{name: given[name] for name in ("placement", "exact", "seed")}}


def _front(ranks: int, microbatches: int, per_rank: int, given: dict[str, Any]) -> None:
    """Print and draw the Pareto front of memory and makespan."""
    from penstock.search import front
    from penstock.show.pareto_chart import Dot, front_page, front_svg
    from penstock.show.summary import memory_text, percent, time_text

    costs, wishes = _asked(ranks, microbatches, per_rank, given, limits=24)
    found = front(ranks, microbatches, costs, **wishes)
    title = f"{ranks} ranks, {costs.num_stages} stages, {microbatches} microbatches: memory against makespan"
    points = [*found.searched, *(point for point in found.known if point not in found.searched)]
    marks = [Dot(p.memory, p.makespan, p.name, p in found.searched) for p in points]
    for name, draw in (("svg", front_svg), ("html", front_page)):
        if given[name] is not None:
            given[name].write_text(draw(marks, title=title), encoding="utf-8")
    if given["as_json"]:
        each = {
            kind: [{k: v for k, v in point._asdict().items() if k != "plan"} for point in points]
            for kind, points in found._asdict().items()
        }
        click.echo(json.dumps(each, indent=2))
        return
    click.echo(f"{title}\n{'memory':>10}{'makespan':>12}{'bubble':>9}{'to bound':>10}  schedule")
    for point in sorted(points, key=lambda point: point[:2]):
        gap, mark = "-" if point.gap is None else percent(point.gap), " *" if point in found.searched else ""
        figures = f"{memory_text(point.memory):>10}{time_text(point.makespan):>12}{percent(point.bubble):>9}"
        click.echo(f"{figures}{gap:>10}  {point.name}{mark}")
    click.echo("* on the Pareto front: the fastest schedule found for its memory")
