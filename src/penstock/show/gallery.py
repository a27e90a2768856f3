"""The gallery: every registered schedule drawn at a small size, with its figures: a page of Markdown and pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from penstock.schedules import Recipe, all_schedules
from penstock.show.summary import figures, idle_sums, memory_text, number, sizes
from penstock.show.svg import to_svg
from penstock.simulate import Timeline, simulate

NUM_RANKS: Final = 4
NUM_MICROBATCHES: Final = 8

_HEAD: Final = """\
# Gallery of schedules

Every schedule that penstock knows, for {ranks} ranks and {microbatches} microbatches, drawn by the code that plans
and times it (`make docs` makes this page). A forward, a backward to the inputs and a backward to the weights take one
unit of time each per rank and microbatch, messages are free. With several stages a rank each stage takes its share.

- *bubble*: the idle share of all ranks' time, from the first start to the last end.
- *longest rank*: the same, measured on the longest rank alone, as the zero-bubble papers print it.
- *peak memory*: the most that any rank holds, in activations of one rank for one microbatch.

In a picture a row is a rank and a number a microbatch; paler boxes belong to later stages of the rank, and hatched is
idle. Hover over a box in the picture itself to read what it is. `penstock plan NAME --html FILE` draws a schedule of
any size as a page to zoom, and `penstock compare` prints this table for your own sizes and times.
"""


def gallery(schedules: Iterable[Recipe] | None = None) -> dict[str, str]:
    """The files of the gallery: path under docs/ -> text.

    >>> sorted(gallery(all_schedules()[:1]))
    ['gallery.md', 'gallery/forward.svg']
    """
    chosen = all_schedules() if schedules is None else schedules
    timed = [(recipe, simulate(recipe(NUM_RANKS, NUM_MICROBATCHES))) for recipe in chosen]
    made = {f"gallery/{recipe.name}.svg": to_svg(timeline, width=880) for recipe, timeline in timed}
    head = _HEAD.format(ranks=NUM_RANKS, microbatches=NUM_MICROBATCHES)
    made["gallery.md"] = "\n".join([head, *_table(timed), *_pictures(timed)])
    return made


_Timed = Sequence[tuple[Recipe, Timeline]]


def _table(timed: _Timed) -> Iterable[str]:
    yield "| schedule | stages a rank | makespan | bubble | longest rank | peak memory |"
    yield "|---|--:|--:|--:|--:|--:|"
    for recipe, timeline in timed:
        shown = (str(timeline.plan.num_stages // NUM_RANKS), *figures(timeline).values())
        yield f"| [{recipe.name}](#{recipe.name}) | {' | '.join(shown)} |"


def _pictures(timed: _Timed) -> Iterable[str]:
    for recipe, timeline in timed:
        held = ", ".join(map(memory_text, timeline.peak_memory))
        causes = ", ".join(f"{cause} {number(time)}" for cause, time in idle_sums(timeline).items() if time > 0)
        yield f"\n## {recipe.name}\n"
        yield f"{recipe.title[:1].upper()}{recipe.title[1:]}: {sizes(timeline.plan)}.\n"
        yield f"![timeline of {recipe.name}](gallery/{recipe.name}.svg)\n"
        _, bubble, longest, _ = figures(timeline).values()
        yield f"- bubble {bubble}, on the longest rank {longest}"
        yield f"- peak memory of the ranks: {held}"
        yield f"- idle time of all ranks: {causes or 'none'}"
    yield ""
