"""The page itself: its controls, its style and its script. The same files serve the server and the static page."""

from __future__ import annotations

from html import escape
from pathlib import Path

from penstock.schedules import all_schedules
from penstock.show.html import script, style

_COUNTS = (("ranks", 64, "devices in a row"), ("microbatches", 256, "parts of a batch"))  # with the largest of each
_TIMES = (
    ("forward", "forward", "time of a forward, per rank and microbatch"),
    ("backward_input", "backward: inputs", "time of the part of a backward that makes gradients of the inputs"),
    ("backward_weight", "backward: weights", "time of the part of a backward that makes gradients of the weights"),
)
_LINKS = (
    ("latency", "latency", "time that a message is under way; it occupies nobody"),
    ("transfer", "transfer", "time that a message occupies its link"),
)

_HEADER = (
    '<header class="ps-top"><div><h1>penstock studio</h1>'
    '<p id="status">Pick a schedule, sizes, times and memory; the picture follows.</p></div>'
    '<div class="st-actions"><button class="ps-button" type="button" data-save="svg">picture</button>'
    '<button class="ps-button" type="button" data-save="csv">plan file</button>'
    '<button class="ps-button" type="button" data-ps-theme title="light or dark">◐ theme</button></div></header>'
)
_COMPARISON = (
    '<section class="ps-card st-compare"><div class="ps-head"><h2>all schedules, these sizes and times</h2></div>'
    '<div class="st-both"><table><thead><tr><th>schedule</th><th>stages</th><th>makespan</th><th></th><th>bubble</th>'
    '<th>peak</th></tr></thead><tbody id="rows"></tbody></table>'
    '<svg id="scatter" viewBox="0 0 420 300" role="img" aria-label="memory against makespan of every schedule"></svg>'
    "</div></section>"
)


def index(*, token: str | None = None) -> str:
    """The page. With a token it asks the server that handed it out; without one it carries its own Python.

    >>> index(token="abc").count("<script")
    2
    """
    where = f' data-token="{escape(token)}"' if token is not None else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>penstock studio</title>'
        '<link rel="icon" href="data:,"><link rel="stylesheet" href="studio.css"></head>\n'
        f'<body class="ps-page"{where}><main>{_HEADER}<div class="st-columns">{_form()}'
        '<div class="st-right"><div id="problem" role="alert" hidden></div><div id="timeline" aria-live="polite"></div>'
        f"{_COMPARISON}</div></div></main>\n"
        '<script src="show.js"></script><script src="studio.js"></script></body></html>\n'
    )


def files() -> dict[str, str]:
    """What lies beside the page: the drawing of timelines, the page's own script and style."""
    return {"show.js": script(), "studio.js": _beside("studio.js"), "studio.css": style() + _beside("studio.css")}


def _beside(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _form() -> str:
    schedules = "".join(
        f'<option value="{escape(recipe.name)}">{escape(recipe.name)}: {escape(recipe.title)}</option>'
        for recipe in all_schedules()
    )
    slider = '<input type="range" data-for="{0}" min="1" max="64" aria-label="{0}">'
    counts = "".join(
        _number(name, name, hint, f'min="1" max="{most}" step="1"', slider.format(name)) for name, most, hint in _COUNTS
    )
    times, links = ("".join(_number(*row) for row in rows) for rows in (_TIMES, _LINKS))
    links += (
        '<label class="st-wide" title="latencies of single links: 2-3=4 both ways, 2&gt;3=4 one way">single links'
        '<input name="links" type="text" placeholder="all the same; 2-3=4"></label>'
    )
    return (
        '<form id="question" class="ps-card st-form" autocomplete="off">'
        f'<label class="st-wide">schedule<select name="schedule">{schedules}</select></label>{counts}'
        '<label>stages a rank<input name="stages_per_rank" type="number" min="1" max="16" placeholder="as it suits"></label>'
        f"<fieldset><legend>times</legend>{times}</fieldset><fieldset><legend>links</legend>{links}</fieldset>"
        '<fieldset><legend>memory</legend><label title="a rank\'s room, in activations of one rank for one microbatch">limit'
        '<input name="memory" type="number" min="0" step="0.5" placeholder="none"></label>'
        "<label title=\"share of the activations that is held from the inputs' part of a backward to the weights' part\">"
        'kept for weights<input name="kept_for_weights" type="number" min="0" max="4" step="0.1" value="1"></label></fieldset>'
        '<fieldset><legend>ranks</legend><label class="st-wide" title="one number for each rank: 1, 1, 1.5, 1">time of each'
        '<input name="speeds" type="text" inputmode="decimal" placeholder="all the same"></label></fieldset>'
        '<label class="st-check"><input name="messages" type="checkbox">with messages</label>'
        '<p class="st-command"><code id="command"></code></p></form>'
    )


def _number(name: str, label: str, hint: str, bounds: str = 'min="0" step="0.1"', beside: str = "") -> str:
    field = f'<input name="{name}" type="number" {bounds} required>{beside}'
    return f'<label title="{escape(hint)}">{escape(label)}{field}</label>'
