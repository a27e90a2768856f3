"""The page as text: what can be said without a browser. `test_page.py` opens it in one."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from penstock.errors import PlanError
from penstock.schedules import get_schedule
from penstock.show import timeline_section, to_html
from penstock.show.html import embed_json, script, style
from penstock.show.page_data import timeline_data
from penstock.simulate import Timeline, simulate
from tests.show.conftest import NASTY


def test_nothing_is_fetched() -> None:
    text = to_html(get_schedule("1f1b")(4, 8))
    assert not re.search(r"https?:|//[a-z]+\.|<link|<iframe|@import|url\(|\bsrc=|fetch\(|XMLHttpRequest|import\(", text)
    assert "default-src &#x27;none&#x27;" in text


def test_embedded_json_cannot_end_its_element() -> None:
    for value in (NASTY, "<!--", "]]>", "\u2028", "</SCRIPT >"):
        made = embed_json({"name": value})
        assert json.loads(made) == {"name": value}
        assert not set("<>&\u2028") & set(made)


def test_names_do_not_become_markup() -> None:
    timeline = replace(simulate(replace(get_schedule("1f1b")(2, 2), name=NASTY)), unit=NASTY)
    text = to_html([(NASTY, timeline)], title=NASTY)
    assert "<img" not in text
    assert text.count("<script") == 2, "the data and the one script"
    assert "<b>&" not in text


def test_scripts_and_style_may_stand_inline() -> None:
    assert "</" not in script()
    assert "</" not in style()


def test_figures_stand_beside_the_timeline() -> None:
    html = timeline_section([("planned", simulate(get_schedule("1f1b")(4, 8)))]).html
    for figure in ("<dd>33</dd>", "<dd>27.3%</dd>", "<dd>4</dd>", "imbalance", "rank 3"):
        assert figure in html


def test_a_measured_timeline_may_know_less(lowered: Timeline) -> None:
    html = timeline_section([("measured", Timeline(lowered.plan, lowered.starts, lowered.ends, unit="s"))]).html
    assert "ps-memory" not in html
    assert "imbalance" in html, "idle time is read off the times"
    assert "<th>peak</th>" not in html


def test_no_timelines_is_an_error() -> None:
    with pytest.raises(PlanError, match="at least one"):
        timeline_section([])


def test_data_counts_from_the_first_start_and_keeps_its_digits() -> None:
    timeline = simulate(get_schedule("1f1b")(2, 3))
    shift = 1.7e9 + 0.123456
    moved = Timeline(
        timeline.plan,
        tuple([shift + time * 1e-3 for time in row] for row in timeline.starts),
        tuple([shift + time * 1e-3 for time in row] for row in timeline.ends),
    )
    row, wanted = timeline_data("x", moved)["rows"][1], timeline_data("x", timeline)["rows"][1]
    assert row["s"] == pytest.approx([time * 1e-3 for time in wanted["s"]], abs=1e-6)
    assert row["k"] == wanted["k"]
