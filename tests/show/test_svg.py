"""The drawing: well-formed, complete, in its place, and nothing from outside but text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from penstock.lower import lower
from penstock.plan import Plan
from penstock.schedules import all_schedules, get_schedule
from penstock.show import to_svg
from penstock.show.svg import nice_step
from penstock.simulate import Costs, Link, Timeline, simulate
from tests.show.conftest import NASTY

SVG = "{http://www.w3.org/2000/svg}"


def drawn(text: str) -> dict[str, tuple[int, float, float]]:
    """Action -> rank, x and width of what is drawn, by the tooltip."""
    found = {}
    for group in ET.fromstring(text).iter(f"{SVG}g"):
        if group.get("class") == "span":
            rect = group.find(f"{SVG}rect")
            action = group.find(f"{SVG}title").text.split(":")[0]
            found[action] = (int(group.get("data-rank")), float(rect.get("x")), float(rect.get("width")))
    return found


@pytest.mark.parametrize("recipe", all_schedules(), ids=lambda recipe: recipe.name)
def test_every_span_is_drawn_on_its_rank_in_its_place(recipe) -> None:
    timeline = simulate(recipe(4, 6))
    found = drawn(to_svg(timeline, width=1000))
    scale = (1000 - 58 - 14) / timeline.makespan
    spans = [span for rank in range(4) for span in timeline.spans(rank)]
    assert len(found) == len(spans)
    for span in spans:
        first = span.action.first if hasattr(span.action, "first") else span.action
        rank, x, width = found[str(first)]
        assert rank == span.rank
        assert x == pytest.approx(58 + span.start * scale, abs=0.01)
        assert width == pytest.approx((span.end - span.start) * scale, abs=1.01)


def test_copies_are_drawn_below_their_rank(copied: Plan) -> None:
    tops = {}
    for group in ET.fromstring(to_svg(copied)).iter(f"{SVG}g"):
        if group.get("class") == "span":
            action = group.find(f"{SVG}title").text.split(":")[0]
            rect = group.find(f"{SVG}rect")
            tops[action] = float(rect.get("y")), float(rect.get("y")) + float(rect.get("height"))
    assert len(tops) == copied.num_actions
    copies = {action for action in tops if action[1] in "OL"}
    for action, (top, bottom) in tops.items():
        if action in copies:
            assert tops["0F0"][1] < top
            assert bottom < tops["1F0"][0]
        else:
            assert (top, bottom) == tops[f"{action[0]}F0"]


def test_title_says_what_it_costs() -> None:
    text = to_svg(get_schedule("1f1b")(4, 8))
    assert "1f1b" in text
    assert "makespan 33 · bubble 27.3% · peak memory 4" in text


def test_text_stands_only_where_it_fits() -> None:
    labels = re.compile(r'<text class="label"')
    assert len(labels.findall(to_svg(get_schedule("1f1b")(4, 8), width=900))) == 64
    assert not labels.findall(to_svg(get_schedule("1f1b")(4, 200), width=400))


def test_what_comes_before_and_after_the_computing_is_drawn_too() -> None:
    plan = lower(get_schedule("1f1b")(2, 2), shards=True, reduce=True)
    timeline = simulate(plan, replace(Costs.unit(plan), unshard=1.0, reduce_grad=2.0))
    for rank, x, width in drawn(to_svg(timeline, width=800)).values():
        assert rank in (0, 1)
        assert x >= 58
        assert x + width <= 800 - 14 + 0.5


def test_all_text_is_escaped() -> None:
    timeline = replace(simulate(replace(get_schedule("1f1b")(2, 2), name=NASTY)), unit=NASTY)
    root = ET.fromstring(to_svg(timeline))
    assert root.find(f"{SVG}text").text == NASTY
    assert not list(root.iter(f"{SVG}script"))
    assert not list(root.iter(f"{SVG}img"))
    assert ET.fromstring(to_svg(timeline, title="a < b")).find(f"{SVG}text").text == "a < b"


@pytest.mark.parametrize(
    ("extent", "ticks", "step"), [(33, 10, 5), (1, 1, 1), (0.07, 7, 0.01), (1000, 3, 500), (0, 5, 1)]
)
def test_steps_of_an_axis_are_round(extent: float, ticks: float, step: float) -> None:
    assert nice_step(extent, ticks) == pytest.approx(step)


@pytest.mark.browser
@pytest.mark.xdist_group("browser")
def test_a_browser_draws_it_in_light_and_dark(
    open_page: Callable[..., Any], overlapped: Plan, lowered: Timeline
) -> None:
    paper = "getComputedStyle(document.querySelector('.paper')).fill"
    for name, shown in (("overlapped.svg", overlapped), ("lowered.svg", lowered)):
        text = to_svg(shown)
        light, dark = open_page(text, name=name), open_page(text, name=name, scheme="dark")
        assert light.evaluate(paper) == "rgb(255, 255, 255)" != dark.evaluate(paper)
        overflow = """() => [...document.querySelectorAll("text")].filter((t) => {
            const box = t.getBoundingClientRect(), all = document.documentElement.getBoundingClientRect();
            return box.right > all.right + 1 || box.left < all.left - 1 || box.bottom > all.bottom + 1;
        }).map((t) => t.textContent)"""
        assert light.evaluate(overflow) == []


@pytest.mark.parametrize(
    ("kind", "action", "longer"),
    [
        ({"microbatches": (1.0, 3.0, 1.0, 1.0)}, "1F1", 3.0),
        ({"ranks": (1.0, 2.0)}, "1F1", 2.0),
        ({"links": (Link(0, 1, 5.0),)}, "1F1", 1.0),
    ],
    ids=["microbatch", "rank", "link"],
)
def test_what_is_not_alike_is_drawn_so(kind: dict[str, Any], action: str, longer: float) -> None:
    plan = get_schedule("1f1b")(2, 4)
    even, uneven = (simulate(plan, replace(Costs.unit(plan), **given)) for given in ({}, kind))
    plain, found = (drawn(to_svg(timeline, width=1000)) for timeline in (even, uneven))
    assert found[action][2] / found["0F0"][2] == pytest.approx(longer * plain[action][2] / plain["0F0"][2], rel=0.02)
    start = (found["1F0"][1] - found["0F0"][1]) / found["0F0"][2]
    assert start == pytest.approx(6.0 if "links" in kind else 1.0, rel=0.05), "and in its place"
