"""A timeline as an SVG drawing: a row a rank, a box an action, hatched where a rank is idle."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from math import floor, log10
from typing import Final

from penstock.checks import check_types
from penstock.errors import PlanError
from penstock.plan import Action, Op, Plan
from penstock.plan.actions import OP, parts, unpack
from penstock.plan.ops import MESSAGES
from penstock.show.colors import paint, shades
from penstock.show.summary import figures, sizes, time_text
from penstock.show.timeline_rows import Bar, Picture
from penstock.simulate import Timeline, simulate

STYLE: Final = """
text{font-family:system-ui,"Segoe UI",Helvetica,Arial,"DejaVu Sans",sans-serif}
.paper{fill:#fff}.title{font-weight:650;font-size:14px;fill:#1b2433}.figures,.word{font-size:11.5px;fill:#5b6779}
.rank{font-size:11.5px;font-weight:600;fill:#364152;text-anchor:end}.tick{font-size:10.5px;fill:#7a8699;text-anchor:middle}
.track{fill:#eef1f5}.hatch{stroke:#d3dae4}.grid{stroke:#dfe4ec;stroke-width:1}.label{text-anchor:middle;font-weight:600}
@media (prefers-color-scheme:dark){.paper{fill:#141a24}.title{fill:#eef2f8}.figures,.word{fill:#a3afc0}
.rank{fill:#cbd4e1}.tick{fill:#8793a6}.track{fill:#202937}.hatch{stroke:#374357}.grid{stroke:#2b3545}}
"""
_GUTTER, _MARGIN, _TOP, _AXIS = 58, 14, 54, 26
_COPIES: Final = 11  # the height of the row of a copy engine
_DIGIT: Final = 0.62  # the width of a digit, in sizes of its font


def to_svg(shown: Timeline | Plan, *, width: int = 900, row: int = 26, title: str | None = None) -> str:
    """The drawing as the text of an SVG file; a plan is timed with unit costs.

    >>> from penstock.schedules import get_schedule
    >>> to_svg(get_schedule("1f1b")(4, 8)).count('<g class="span"')
    64
    """
    check_types("to_svg", PlanError, shown=(shown, Timeline | Plan), width=(width, int), row=(row, int))
    check_types("to_svg", PlanError, title=(title, str | None))
    timeline = simulate(shown) if isinstance(shown, Plan) else shown
    return "\n".join(_Drawing(timeline, width, row, title).parts()) + "\n"


class _Drawing:
    """Sizes, and what follows from them. Every text that is not a number passes through `escape`."""

    def __init__(self, timeline: Timeline, width: int, row: int, title: str | None) -> None:
        self.timeline, self.width, self.row, self.title = timeline, width, row, title
        self.picture, self.shades = Picture.of(timeline), shades(timeline.plan)
        self.bottom = self.y(timeline.plan.num_ranks)
        self.height, self.legend = self.drawn_legend()
        # Whether every box has room for its whole action; if not, all of them show their microbatch alone.
        self.whole_words = all(
            _room(str(part), min(11.5, row / len(actions) - 1)) + 6 <= self.x(bar.end) - self.x(bar.start)
            for bars in self.picture.ranks
            for bar in bars
            if bar.end > bar.start
            for actions in [_actions(bar)]
            for part in actions
        )

    def x(self, time: float) -> float:
        room = self.width - _GUTTER - _MARGIN
        return _GUTTER + (time - self.picture.start) / (self.picture.length or 1.0) * room

    def y(self, rank: int) -> int:
        return _TOP + rank * (self.row + 4 + (_COPIES + 2) * bool(self.picture.copies))

    def parts(self) -> Iterator[str]:
        plan, timeline = self.timeline.plan, self.timeline
        name = escape(self.title if self.title is not None else plan.name or "plan")
        makespan, bubble, _, held = figures(timeline).values()
        words = escape(f"{sizes(plan)} · makespan {makespan} · bubble {bubble} · peak memory {held}")
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{name}: {words}">'
        )
        yield f"<style>{STYLE}</style>"
        yield (
            '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            '<rect class="track" width="6" height="6"/><path class="hatch" d="M0 0V6" stroke-width="2"/></pattern>'
            "</defs>"
        )
        yield f'<rect class="paper" width="{self.width}" height="{self.height}" rx="8"/>'
        yield f'<text class="title" x="{_MARGIN}" y="22">{name}</text>'
        yield f'<text class="figures" x="{_MARGIN}" y="40">{words}</text>'
        yield from self.rows()
        yield from self.axis()
        yield from self.legend
        yield "</svg>"

    def rows(self) -> Iterator[str]:
        for rank, bars in enumerate(self.picture.ranks):
            y = self.y(rank)
            yield f'<g class="row"><text class="rank" x="{_GUTTER - 8}" y="{y + self.row / 2 + 4:g}">rank {rank}</text>'
            yield from self.track(f"rank {rank}", rank, bars, y, self.row)
            for copies in self.picture.copies[rank : rank + 1]:
                yield from self.track(f"rank {rank}'s copy engine", rank, copies, y + self.row + 2, _COPIES)
            yield "</g>"

    def track(self, whose: str, rank: int, bars: list[Bar], y: int, height: int) -> Iterator[str]:
        yield (
            f'<rect x="{_GUTTER:.2f}" y="{y}" width="{self.width - _GUTTER - _MARGIN:.2f}" height="{height}" rx="3" '
            f'fill="url(#idle)"><title>{whose} is idle here</title></rect>'
        )
        for bar in bars:
            yield self.span(rank, bar, y, height)

    def span(self, rank: int, bar: Bar, y: float, tall: float) -> str:
        x, until = self.x(bar.start), self.x(bar.end)
        width = max(until - x - (1 if until - x > 4 else 0), 0.4)
        actions = _actions(bar)
        height = tall / len(actions)
        begin, end = (time_text(time - self.picture.start, self.timeline.unit) for time in (bar.start, bar.end))
        words = escape("; overlapped with ".join(map(_described, actions)) + f"\nrank {rank}, {begin} to {end}")
        drawn = [f'<g class="span" data-rank="{rank}"><title>{words}</title>']
        for number, action in enumerate(actions):
            top = y + number * height
            colour = paint(action.op, *self.shades[action.stage])
            round_by = f' rx="{min(3.0, width / 4):.2g}"' if width > 3 and len(actions) == 1 else ""
            drawn.append(
                f'<rect x="{x:.2f}" y="{top:g}" width="{width:.2f}" height="{height:g}"{round_by} '
                f'fill="{colour.fill}"/>'
            )
            brief = action.op.row.letter if action.microbatch is None else str(action.microbatch)
            label, size = str(action) if self.whole_words else brief, min(11.5, height - 1)
            if _room(label, size) <= width + 1:
                drawn.append(
                    f'<text class="label" x="{x + width / 2:.2f}" y="{top + height / 2 + size * 0.36:.2f}" '
                    f'font-size="{size:g}" fill="{colour.ink}">{label}</text>'
                )
        return "".join(drawn) + "</g>"

    def axis(self) -> Iterator[str]:
        step = nice_step(self.picture.length, (self.width - _GUTTER - _MARGIN) / 64)
        for number in range(int(self.picture.length / step + 1e-9) + 1):
            x = self.x(self.picture.start + number * step)
            yield f'<path class="grid" d="M{x:.2f} {self.bottom - 2}v6"/>'
            words = escape(time_text(number * step, self.timeline.unit))
            yield f'<text class="tick" x="{x:.2f}" y="{self.bottom + 16}">{words}</text>'

    def drawn_legend(self) -> tuple[int, list[str]]:
        """The height of the whole drawing, and the entries below it; a new line when the next does not fit."""
        plan, drawn = self.timeline.plan, []
        wanted = [(paint(op).fill, f"{op.name} {op.row.word}") for op in ops_of(plan)]
        wanted.append(("url(#idle)", "idle"))
        if plan.num_stages > plan.num_ranks:
            wanted.append(("", "paler: later stages of the rank"))
        x, y = float(_GUTTER), self.bottom + _AXIS + 10
        for fill, words in wanted:
            length = 34 + len(words) * 6.6
            if x + length - 18 > self.width - _MARGIN and x > _GUTTER:
                x, y = float(_GUTTER), y + 18
            if fill:
                drawn.append(f'<rect x="{x:g}" y="{y - 9}" width="11" height="11" rx="2.5" fill="{fill}"/>')
            drawn.append(f'<text class="word" x="{x + (16 if fill else 0):g}" y="{y}">{words}</text>')
            x += length
        return y + 14, drawn


def ops_of(plan: Plan) -> list[Op]:
    """The kinds of action, messages aside, that a plan holds, in the order of a legend."""
    used = {part & OP for codes in plan.codes for code in codes for part in parts(code)}
    return [Op(number) for number in sorted(used - MESSAGES)]


def nice_step(extent: float, ticks: float) -> float:
    """1, 2 or 5 times a power of ten, so that about `ticks` steps of it cover `extent`.

    >>> nice_step(33, 10), nice_step(0.07, 7)
    (5.0, 0.01)
    """
    if extent <= 0:
        return 1.0
    rough = extent / max(ticks, 1.0)
    base = 10.0 ** floor(log10(rough))
    return next(base * factor for factor in (1, 2, 5, 10) if base * factor >= rough * 0.999999)


def _actions(bar: Bar) -> list[Action]:
    return [action for action in map(unpack, parts(bar.code)) if isinstance(action, Action)]


def _room(words: str, size: float) -> float:
    return len(words) * size * _DIGIT + 4


def _described(action: Action) -> str:
    """``2F3: forward, stage 2, microbatch 3``."""
    microbatch = "" if action.microbatch is None else f", microbatch {action.microbatch}"
    return f"{action}: {action.op.row.word}, stage {action.stage}{microbatch}"
