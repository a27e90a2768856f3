"""Timelines as a part of a page, and as one self-contained page: zoom, pan, hover, memory, figures, light and dark.

The drawing is done by three small scripts beside this file: `model.js` holds the columns of a timeline and knows what
needs what, `draw.js` paints, `view.js` listens. Nothing is fetched, and every text from outside goes through `escape`.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import NamedTuple

from penstock.checks import check_types
from penstock.errors import PlanError
from penstock.plan import Plan
from penstock.show.colors import paint
from penstock.show.page_data import timeline_data
from penstock.show.summary import figures, holds, idle_sums, memory_text, percent, sizes, time_text
from penstock.show.svg import ops_of
from penstock.simulate import Timeline, simulate

_CAUSE_WORDS = {
    "busy": "",
    "filling": "before the first action",
    "draining": "after the last action",
    "communication": "value under way",
    "imbalance": "value not ready",
}


class Section(NamedTuple):
    """A part of a page: put `style` into a <style> and `script` into a <script> after all sections, once each.

    timeline_section([("planned", timeline)]).html
    """

    html: str
    style: str
    script: str


def timeline_section(timelines: Sequence[tuple[str, Timeline]]) -> Section:
    """One or more named timelines on one shared time axis, each from its own first start.

    >>> from penstock.schedules import get_schedule
    >>> plan = get_schedule("1f1b")(4, 8)
    >>> section = timeline_section([("planned", simulate(plan)), ("measured", simulate(plan))])
    >>> section.html.count("<canvas class=\\"ps-rows\\"")
    2
    """
    check_types("timeline_section", PlanError, timelines=(timelines, Sequence[tuple[str, Timeline]]))
    if not timelines:
        raise PlanError("a section of no timelines; expected at least one (name, Timeline)")
    blocks = "".join(_block(name, timeline) for name, timeline in timelines)
    data = embed_json([timeline_data(name, timeline) for name, timeline in timelines])
    html = (
        f'<section class="ps-section">{_bar([timeline for _, timeline in timelines])}{blocks}'
        '<div class="ps-tip" role="status" hidden></div>'
        f'<script type="application/json" class="ps-data">{data}</script></section>'
    )
    return Section(html, style(), script())


def to_html(shown: Timeline | Plan | Sequence[tuple[str, Timeline]], *, title: str | None = None) -> str:
    """One page with one timeline (a plan is timed with unit costs), or with several on one time axis.

    >>> from penstock.schedules import get_schedule
    >>> to_html(get_schedule("1f1b")(4, 8)).startswith("<!doctype html>")
    True
    """
    check_types("to_html", PlanError, shown=(shown, Timeline | Plan | Sequence[tuple[str, Timeline]]))
    check_types("to_html", PlanError, title=(title, str | None))
    if isinstance(shown, Plan):
        shown = simulate(shown)
    timelines = [("measured" if shown.measured else "simulated", shown)] if isinstance(shown, Timeline) else list(shown)
    section = timeline_section(timelines)
    first = timelines[0][1]
    name = title if title is not None else first.plan.name or "plan"
    heading = (
        f'<header class="ps-top"><div><h1>{escape(name)}</h1>'
        f"<p>{escape(sizes(first.plan))}, {first.plan.num_actions} actions</p></div>"
        '<button class="ps-button" type="button" data-ps-theme title="light or dark">◐ theme</button></header>'
    )
    return page(name, heading + section.html, style_text=section.style, script_text=section.script)


def page(title: str, body: str, *, style_text: str, script_text: str) -> str:
    """A whole page around a body. Its policy lets nothing load, and no script run but the given one."""
    digest = b64encode(sha256(script_text.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style_text}</style></head>\n"
        f'<body class="ps-page"><main>{body}</main>\n<script>{script_text}</script></body></html>\n'
    )


def embed_json(value: object) -> str:
    """JSON that can stand inside a <script> element: no text in it can end the element or open a comment."""
    made = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return made.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def style() -> str:
    """The style of sections, and of a page around them."""
    return _beside("style.css")


def script() -> str:
    """The script that brings all sections of a page to life."""
    return '"use strict";\n{\n' + "\n".join(map(_beside, ("model.js", "draw.js", "view.js"))) + "}\n"


@cache
def _beside(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _bar(timelines: Sequence[Timeline]) -> str:
    """Return the legend of colors, and the toolbar."""
    used = {op for timeline in timelines for op in ops_of(timeline.plan)}
    colours = "".join(
        f'<span><i style="background:{paint(op).fill}"></i>{op.name} {op.row.word}</span>' for op in sorted(used)
    )
    if any(timeline.plan.num_stages > timeline.plan.num_ranks for timeline in timelines):
        colours += "<span>paler: later stages of the rank</span>"
    messages = ""
    if any(timeline.plan.is_lowered for timeline in timelines):
        messages = '<label><input type="checkbox" class="ps-messages" autocomplete="off">messages</label>'
    tools = "".join(
        f'<button class="ps-button" type="button" data-ps-do="{do}" title="{hint}">{sign}</button>'
        for do, sign, hint in (("in", "+", "zoom in (+)"), ("out", "−", "zoom out (-)"), ("fit", "fit", "show all (0)"))
    )
    return (
        f'<div class="ps-bar"><div class="ps-legend">{colours}<span><i class="ps-idle"></i>idle</span></div>'
        f'<div class="ps-tools">{messages}<span class="ps-hint">wheel zooms, drag pans, click pins</span>{tools}</div>'
        "</div>"
    )


def _block(name: str, timeline: Timeline) -> str:
    listed = "".join(f"<div><dt>{word}</dt><dd>{escape(value)}</dd></div>" for word, value in figures(timeline).items())
    memory = '<canvas class="ps-memory"></canvas>' if holds(timeline) else ""
    label = escape(f"{name}: timeline of {timeline.plan.num_ranks} ranks; the table beside it has the figures")
    return (
        f'<article class="ps-block ps-card"><div class="ps-head"><h2>{escape(name)}</h2>'
        f'<dl class="ps-figures">{listed}</dl></div>'
        f'<div class="ps-body"><div class="ps-plots" tabindex="0" role="application" aria-label="{label}">'
        f'<canvas class="ps-rows"></canvas>{memory}<div class="ps-scroll" aria-hidden="true">'
        f'<div class="ps-thumb"></div></div><div class="ps-line"></div></div>{_side(timeline)}</div></article>'
    )


def _side(timeline: Timeline) -> str:
    """Return the use of the makespan by all ranks together, then by each rank, with its peak memory."""
    whole, peaks = timeline.makespan or 1.0, timeline.peak_memory
    rows = ""
    for rank, busy in enumerate(timeline.busy):
        shares = {"busy": busy, **asdict(timeline.idle[rank])}
        stack = "".join(
            f'<i style="width:{100 * value / whole:.2f}%;background:var(--ps-{cause})" '
            f'title="{cause} {escape(time_text(value, timeline.unit))}"></i>'
            for cause, value in shares.items()
            if value > 0
        )
        held = f"<td>{memory_text(peaks[rank])}</td>" if holds(timeline) else ""
        rows += f'<tr><td>rank {rank}</td><td class="ps-share"><div class="ps-stack">{stack}</div></td>'
        rows += f"<td>{percent(busy / whole)}</td>{held}</tr>"
    peak_head = "<th>peak</th>" if holds(timeline) else ""
    head = f"<thead><tr><th>rank</th><th></th><th>busy</th>{peak_head}</tr></thead>"
    causes = "".join(
        f'<i style="background:var(--ps-{cause})"></i><span>{cause} <small>{_CAUSE_WORDS[cause]}</small></span>'
        f"<b>{percent(total / (timeline.makespan * len(timeline.idle) or 1.0))}</b>"
        for cause, total in ({"busy": sum(timeline.busy)} | idle_sums(timeline)).items()
    )
    table = f"<table>{head}<tbody>{rows}</tbody></table>"
    return f'<aside class="ps-side"><div class="ps-causes">{causes}</div>{table}</aside>'
