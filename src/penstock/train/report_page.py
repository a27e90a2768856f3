"""The page of a report: loss curve, planned above measured, idle time, memory, speed, stages. Nothing is fetched."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import starmap
from math import ceil, floor, isfinite

from penstock.balance.cuts import size_text
from penstock.front import Choice
from penstock.front.choice_text import rank_rows, stage_rows
from penstock.nest import Value
from penstock.show import predicted_vs_measured
from penstock.show.html import page, timeline_section
from penstock.show.summary import CAUSES, percent, sizes, time_text
from penstock.show.svg import nice_step
from penstock.simulate import Timeline

Points = Sequence[tuple[int, float]]
NOT_MEASURED = (
    "Nothing was measured before training: the plan is drawn with estimated costs, scaled to the measured time."
)
_STYLE = """
.pr-grid { display: grid; gap: 14px; margin-bottom: 14px; }
.pr-grid { grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); }
.pr-tables { display: flex; flex-wrap: wrap; gap: 14px; margin-bottom: 14px; }
.pr-tables > .pr-card { flex: 1 1 560px; }
.pr-card { padding: 14px 16px 12px; min-width: 0; }
main > .pr-card { margin-bottom: 14px; }
.pr-card h2 { margin: 0 0 8px; font-size: 15px; }
.pr-card p { margin: 6px 0 0; color: var(--ps-soft); font-size: 12.5px; }
.pr-scroll { overflow-x: auto; background: linear-gradient(90deg, transparent 95%, var(--ps-line)) 0 0 / 100% 100% scroll; }
.pr-scroll > * { background: var(--ps-paper); }
.pr-card table { width: 100%; border-collapse: collapse; font-size: 12.5px; font-variant-numeric: tabular-nums; }
.pr-card th { color: var(--ps-soft); font-weight: 500; text-align: right; padding: 3px 0 5px 12px; vertical-align: bottom; }
.pr-card td { text-align: right; padding: 3px 0 3px 12px; white-space: nowrap; border-top: 1px solid var(--ps-line); }
.pr-card :is(th, td):first-child, .pr-card :is(th, td).pr-words { text-align: left; }
.pr-card :is(th, td):first-child { padding-left: 0; }
.pr-figures { display: flex; flex-wrap: wrap; gap: 10px; margin: 0 0 14px; padding: 0; }
.pr-figures div { padding: 8px 14px; }
.pr-figures dt { color: var(--ps-soft); font-size: 12px; }
.pr-figures dd { margin: 0; font-size: 18px; font-weight: 650; font-variant-numeric: tabular-nums; }
pre.pr-words { margin: 0; font: 12.5px/1.5 system-ui, "DejaVu Sans", sans-serif; white-space: pre-wrap; }
.pr-curve { width: 100%; height: auto; display: block; }
.pr-curve text { fill: var(--ps-soft); font: 11px system-ui, "DejaVu Sans", sans-serif; }
.pr-curve .pr-axis { stroke: var(--ps-line); stroke-width: 1; }
.pr-curve .pr-train { fill: none; stroke: var(--ps-feeds); stroke-width: 1.6; stroke-linejoin: round; }
.pr-curve .pr-valid { fill: none; stroke: var(--ps-needs); stroke-width: 1.6; stroke-dasharray: 4 3; }
.pr-curve circle { fill: var(--ps-needs); }
@media (max-width: 600px) {
  .pr-card table { font-size: 11.5px; }
  .pr-card :is(th, td) { padding-left: 7px; }
  .pr-tables .pr-card { padding: 12px 10px 10px; }
  .pr-tables table { font-size: 9.5px; }
  .pr-tables :is(th, td) { padding-left: 3px; }
  .pr-card :is(td:first-child, td.pr-words) { white-space: normal; }
  .pr-curve text { font-size: 16px; }
}
"""


def render(data: dict[str, Value], choice: Choice, words: str, *, planned: Timeline, measured: Timeline) -> str:
    """The whole page as text; `words` say where the time goes."""
    timed = choice.is_timed
    section = timeline_section([("planned", planned), ("measured", measured)])
    losses = _legend(feeds="training", needs="validation" if data["validation"] else "")
    speed = _card("Loss", loss_curve(data["losses"], data["validation"]), losses)
    speed += _card("Speed", _table(_speed_rows(data, planned if timed else None, measured)), _checked(data))
    kinds = _table(predicted_vs_measured.rows(predicted_vs_measured.kinds(planned, measured), measured.plan.num_ranks))
    tables = _card("Planned", f"<p>{NOT_MEASURED}</p>")
    if timed:
        tables = _card("Predicted and measured", kinds, predicted_vs_measured.verdict(planned, measured))
    column = ["activations, measured", *map(size_text, data["memory"])]
    held = [[*row[:3], cell, *row[3:]] for row, cell in zip(rank_rows(choice), column, strict=True)]
    tables += _card("Idle time by cause", _table(_idle_rows(planned, measured), words=(1,)), "share of the makespan")
    tables += _card(
        "Memory of each rank",
        _table(held),
        "Activations are those of the microbatches in flight; measured is the most that a step took beside parameters "
        "and gradients, with what operators need for a moment.",
    )
    when = f"for one microbatch, {'as measured' if timed else 'estimated'} before training"
    body = (
        f'<header class="ps-top"><div><h1>{escape(data["title"])}</h1>'
        f"<p>{escape(measured.plan.name)}, {escape(sizes(measured.plan))}</p></div>"
        '<button class="ps-button" type="button" data-ps-theme title="light or dark">◐ theme</button></header>'
        f'{_figures(data, planned, measured)}<div class="pr-grid">{speed}</div>{section.html}'
        f'<div class="pr-tables">{tables}</div>{_held(data.get("held", []))}'
        + _card("Where the time goes", f'<pre class="pr-words">{escape(words)}</pre>')
        + f'<div class="pr-tables">{_card("Stages", _table(stage_rows(choice), words=(2,)), when)}</div>'
    )
    return page(data["title"], body, style_text=section.style + _STYLE, script_text=section.script)


def _held(ranks: Sequence[dict[str, Value]]) -> str:
    """For each rank what it holds after each action of a step, the plan over what was counted."""
    cards = ""
    for number, one in enumerate(ranks):
        if one["measured"] and len(one["measured"]) == len(one["planned"]):
            note = _legend(needs="planned" if any(one["planned"]) else "", feeds="counted, after each action")
            parts = ", ".join(f"{escape(kind)} {size_text(size)}" for kind, size in one["kinds"].items())
            note += f"at the peak of the plan: {parts}" if parts else ""
            curve = memory_curve(one["planned"], one["measured"])
            cards += _card(f"Rank {number}: what a step holds", curve, note)
    return f'<div class="pr-grid">{cards}</div>' if cards else ""


def memory_curve(planned: Sequence[float], measured: Sequence[float]) -> str:
    """A drawing of two curves of bytes, by action.

    >>> memory_curve([1024, 2048, 0], [1000, 2100, 0]).count("<polyline")
    2
    """
    most = max((*planned, *measured, 1))
    lines = {"pr-train": [*enumerate(measured, 1)], "pr-valid": [*enumerate(planned, 1)] if any(planned) else []}
    ticks = {share * most: size_text(round(share * most)) for share in (0.0, 0.5, 1.0)}
    label = f"memory over {len(planned)} actions, at most {size_text(round(max(measured, default=0)))}"
    return _curves(lines, ticks, {len(planned): f"action {len(planned)}"}, label=label)


def _figures(data: dict[str, Value], planned: Timeline, measured: Timeline) -> str:
    losses = [loss for _, loss in _numbers(enumerate(data["losses"]))]
    steps = f"{time_text(predicted_vs_measured.step_time(planned), 's')} / {time_text(measured.makespan, 's')}"
    figures = {
        "steps": str(len(data["losses"])),
        "loss, first to last": f"{losses[0]:.3f} → {losses[-1]:.3f}" if losses else "-",
        "step, planned / measured": steps,
        "bubble, planned / measured": f"{percent(planned.bubble_makespan)} / {percent(measured.bubble_makespan)}",
    }
    cards = (f'<div class="ps-card"><dt>{word}</dt><dd>{escape(value)}</dd></div>' for word, value in figures.items())
    return f'<dl class="pr-figures">{"".join(cards)}</dl>'


def _card(title: str, inner: str, note: str = "") -> str:
    below = f"<p>{note}</p>" if note else ""
    return f'<section class="ps-card pr-card"><h2>{escape(title)}</h2><div class="pr-scroll">{inner}</div>{below}</section>'


def _legend(**words: str) -> str:
    """Words for the colours of curves; a colour without a word is left out."""
    keys = (
        f'<span><i style="background:var(--ps-{colour})"></i>{word}</span>' for colour, word in words.items() if word
    )
    return f'<span class="ps-legend">{"".join(keys)}</span>'


def _checked(data: dict[str, Value]) -> str:
    checked = data["checked"]
    if checked is None:
        return "not compared with the unpipelined model"
    difference = checked["difference"]
    apart = "not a number" if difference is None else f"{difference:.3g}" if difference else "0.0"
    return (
        f"Before training, {checked['steps']} steps were compared with the unpipelined model ({escape(checked['against'])}): "
        f"largest difference {apart}."
    )


def _table(rows: list[list[str]], *, words: Sequence[int] = ()) -> str:
    kinds = dict.fromkeys(words, " class=pr-words")

    def cells(row: list[str], tag: str) -> str:
        return "".join(f"<{tag}{kinds.get(at, '')}>{escape(cell)}</{tag}>" for at, cell in enumerate(row))

    head, *rest = rows
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rest)
    return f"<table><thead><tr>{cells(head, 'th')}</tr></thead><tbody>{body}</tbody></table>"


def _speed_rows(data: dict[str, Value], planned: Timeline | None, measured: Timeline) -> list[list[str]]:
    def row(what: str, seconds: float) -> list[str]:
        return [what, time_text(seconds, "s"), f"{data['rows'] / seconds:,.0f}" if seconds > 0 else "-"]

    made = [["", "a step takes", f"{data['unit']} a second"]]
    if planned is not None:
        made.append(row("predicted, without the optimizer", predicted_vs_measured.step_time(planned)))
    made.append(row("measured, without the optimizer", measured.makespan))
    if data["seconds"]:
        made.append(row("measured, training (median)", statistics.median(data["seconds"])))
    if data["checked"] is not None:
        made.append(row("one process, unpipelined, training", data["checked"]["seconds"]))
    for lost in data.get("recoveries", ()):
        what = f"from the loss of a rank to the end of step {lost['step']}, with {lost['ranks']} ranks"
        made.append([what, time_text(lost["seconds"], "s"), "-"])
    if saving := data.get("saving"):
        what = f"a checkpoint keeps steps waiting (median of {len(saving)})"
        made.append([what, time_text(statistics.median(saving), "s"), "-"])
    return made


def _idle_rows(planned: Timeline, measured: Timeline) -> list[list[str]]:
    rows = [["rank", "", "busy", *CAUSES]]
    for rank in range(measured.plan.num_ranks):
        for name, timeline in (("planned", planned), ("measured", measured)):
            shares = [timeline.busy[rank], *(getattr(timeline.idle[rank], cause) for cause in CAUSES)]
            rows.append([str(rank), name, *(percent(share / (timeline.makespan or 1.0)) for share in shares)])
    return rows


def loss_curve(losses: Sequence[float], validation: Points) -> str:
    """A drawing of the losses by step.

    >>> loss_curve([3.0, 2.0], [(2, 2.5)]).count("<circle")
    1
    """
    points, marks = _numbers(enumerate(losses, 1)), _numbers(validation)
    if not points:
        return "<p>no losses</p>"
    values = [loss for _, loss in points + marks]
    last = max(step for step, _ in points + marks)
    ticks = {tick: f"{tick:g}" for tick in _ticks(min(values), max(values))}
    inner = [step for step in map(round, _ticks(1, last)) if 1 < step < last * 0.93]
    label = f"loss over {last} steps, from {points[0][1]:.3f} to {points[-1][1]:.3f}"
    below = {step: str(step) for step in (1, *inner, last)}
    return _curves({"pr-train": points, "pr-valid": marks}, ticks, below, label=label, dots=marks)


def _numbers(points: Iterable[tuple[int, float | None]]) -> list[tuple[int, float]]:
    """The points that can be drawn: a loss may have become no number, or infinite."""
    return [(step, loss) for step, loss in points if loss is not None and isfinite(loss)]


def _curves(
    lines: Mapping[str, Points], ticks: Mapping[float, str], below: Mapping[int, str], *, label: str, dots: Points = ()
) -> str:
    """A drawing of lines from number 1 on, each with its class; with words at the heights of `ticks`, and at numbers `below`."""
    width, height, right, top, bottom = 640.0, 240.0, 10.0, 12.0, 26.0
    left = 12.0 + 7 * max(map(len, ticks.values()))
    low, high, last = min(ticks), max(ticks), max(below)

    def at(x: float, y: float) -> tuple[float, float]:
        across = left + (width - left - right) * ((x - 1) / max(last - 1, 1))
        return across, height - bottom - (height - top - bottom) * ((y - low) / ((high - low) or 1))

    parts = []
    for tick, words in ticks.items():
        _, y = at(1, tick)
        parts.append(f'<line class="pr-axis" x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{words}</text>')
    for number, words in below.items():
        x, anchor = at(number, low)[0], "end" if number == last else "middle"
        parts.append(f'<text x="{x:.1f}" y="{height - 8}" text-anchor="{anchor}">{words}</text>')
    for name, points in lines.items():
        spelled = " ".join(f"{x:.1f},{y:.1f}" for x, y in starmap(at, points))
        parts.append(f'<polyline class="{name}" points="{spelled}"/>')
    for step, value in dots:
        x, y = at(step, value)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"><title>step {step}: {value:.4f}</title></circle>')
    return f'<svg class="pr-curve" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers around a range, about five."""
    step = nice_step((high - low) or abs(high) or 1.0, 4)
    first, last = floor(low / step), ceil(high / step)
    return [round(step * number, 12) for number in range(first, max(last, first + 1) + 1)]
