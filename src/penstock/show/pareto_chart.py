"""A chart of points and steps, as SVG and as a page: what a schedule holds against how long it takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import ceil, floor
from typing import Final, NamedTuple

from penstock.show.html import page, style
from penstock.show.svg import STYLE, nice_step

_STYLE: Final = f"""{STYLE}.up{{text-anchor:end}}
.line{{fill:none;stroke:#2f6fdb;stroke-width:2}}.ours{{fill:#2f6fdb}}.theirs{{fill:#c2410c}}
@media (prefers-color-scheme:dark){{.line{{stroke:#6ea0f5}}.ours{{fill:#6ea0f5}}.theirs{{fill:#f59e6b}}}}
"""
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 44, 44


class Dot(NamedTuple):
    """A named point; `ours` are joined by a line of steps."""

    x: float
    y: float
    label: str
    ours: bool


def front_svg(marks: Sequence[Dot], *, title: str, width: int = 900, height: int = 480) -> str:
    """The chart as the text of an SVG file: memory to the right, makespan upwards.

    >>> front_svg([Dot(2.0, 30.0, "v-min", False), Dot(2.0, 28.0, "searched", True)], title="4 x 8").count("<circle")
    2
    """
    return "\n".join(_parts(marks, title, width, height)) + "\n"


def front_page(marks: Sequence[Dot], *, title: str) -> str:
    """The chart on a page of its own, with its figures as a table. Nothing is fetched."""
    cells = [[escape(mark.label), f"{mark.x:.6g}", f"{mark.y:.6g}"] for mark in sorted(marks)]
    rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in cells)
    head = "<thead><tr><th>schedule</th><th>memory</th><th>makespan</th></tr></thead>"
    drawing = f'<div style="overflow-x:auto">{front_svg(marks, title=title)}</div>'
    figures = f'<div class="ps-side"><table>{head}<tbody>{rows}</tbody></table></div>'
    body = f'<h1>{escape(title)}</h1><article class="ps-card ps-block">{drawing}{figures}</article>'
    return page(title, body, style_text=style(), script_text="")


def _parts(marks: Sequence[Dot], title: str, width: int, height: int) -> Iterator[str]:
    across = _Axis([mark.x for mark in marks], _LEFT, width - _RIGHT)
    up = _Axis([mark.y for mark in marks], height - _BOTTOM, _TOP)
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    yield f'<style>{_STYLE}</style><rect class="paper" width="{width}" height="{height}"/>'
    yield f'<text class="title" x="{_LEFT}" y="24">{escape(title)}</text>'
    for tick in across.ticks:
        x = across.at(tick)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{height - _BOTTOM}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{height - _BOTTOM + 16}">{tick:g}</text>'
    for tick in up.ticks:
        y = up.at(tick)
        yield f'<line class="grid" y1="{y:.1f}" y2="{y:.1f}" x1="{_LEFT}" x2="{width - _RIGHT}"/>'
        yield f'<text class="tick up" x="{_LEFT - 8}" y="{y + 4:.1f}">{tick:g}</text>'
    middle = (_LEFT + width - _RIGHT) / 2
    yield f'<text class="word" x="{middle}" y="{height - 10}" text-anchor="middle">peak memory of a rank</text>'
    yield f'<text class="word" x="{_LEFT}" y="{_TOP - 6}">makespan</text>'
    if ours := sorted(mark for mark in marks if mark.ours):
        steps = "".join(f"H{across.at(mark.x):.1f}V{up.at(mark.y):.1f}" for mark in ours[1:])
        start = f"M{across.at(ours[0].x):.1f} {up.at(ours[0].y):.1f}"
        yield f'<path class="line" d="{start}{steps}H{width - _RIGHT}"/>'
    for mark in sorted(marks):
        x, y = across.at(mark.x), up.at(mark.y)
        kind = "ours" if mark.ours else "theirs"
        words = escape(f"{mark.label}: memory {mark.x:.6g}, makespan {mark.y:.6g}")
        yield f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{words}</title></circle>'
        if not mark.ours:
            yield f'<text class="word" x="{x + 7:.1f}" y="{y - 5:.1f}">{escape(mark.label)}</text>'
    yield "</svg>"


class _Axis:
    """From figures to places on paper, with some room on both sides, and about six round numbers between."""

    def __init__(self, values: Sequence[float], begin: float, end: float) -> None:
        low, high = min(values, default=0.0), max(values, default=1.0)
        room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        self.low, self.begin = low - room, begin
        self.scale = (end - begin) / (high - low + 2 * room)
        step = nice_step(high - low + 2 * room, 8)
        first, last = floor(self.low / step) + 1, ceil((high + room) / step)
        self.ticks = [round(number * step, 12) for number in range(first, last)]

    def at(self, value: float) -> float:
        return self.begin + (value - self.low) * self.scale
