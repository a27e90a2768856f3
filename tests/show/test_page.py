"""The page in a real browser: it opens without an error, every span is on its rank, it reacts to hover and zoom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from penstock.plan import Plan
from penstock.schedules import get_schedule
from penstock.show import timeline_section, to_html
from penstock.show.colors import paint
from penstock.show.html import page as whole_page
from penstock.simulate import Timeline, simulate
from tests.show.conftest import NASTY

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]

Open = Callable[..., Any]


def spans(page: Any) -> list[dict[str, Any]]:
    return page.evaluate("penstock.spans()")


def span(page: Any, action: str, timeline: str | None = None) -> dict[str, Any]:
    return next(s for s in spans(page) if s["action"] == action and timeline in (None, s["timeline"]))


def centre(box: dict[str, Any]) -> tuple[float, float]:
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def hover(page: Any, action: str, timeline: str | None = None) -> None:
    page.mouse.move(*centre(span(page, action, timeline)))
    settle(page)


def settle(page: Any) -> None:
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def window(page: Any) -> tuple[float, float]:
    settle(page)
    return tuple(page.evaluate("[penstock.views[0].from, penstock.views[0].to]"))


def pixel(page: Any, x: float, y: float) -> tuple[int, ...]:
    """The colour that is on the screen at a point, read from the canvas under it."""
    script = """([x, y]) => {
        const canvas = document.elementsFromPoint(x, y).find((e) => e.tagName === "CANVAS");
        const area = canvas.getBoundingClientRect(), scale = canvas.width / area.width;
        return [...canvas.getContext("2d").getImageData((x - area.left) * scale, (y - area.top) * scale, 1, 1).data];
    }"""
    return tuple(page.evaluate(script, [x, y]))


def expected(timeline: Timeline) -> list[tuple[int, str, float, float]]:
    """What must be drawn: every action that occupies its rank."""
    return sorted(
        (s.rank, str(s.action), s.start, s.end)
        for rank in range(timeline.plan.num_ranks)
        for s in timeline.spans(rank)
        if not (hasattr(s.action, "op") and s.action.op.is_message)
    )


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipev", "interleaved1f1b"])
def test_every_span_is_on_its_rank_in_its_place(open_page: Open, name: str) -> None:
    timeline = simulate(get_schedule(name)(4, 6))
    page = open_page(to_html(timeline))
    found = spans(page)
    assert sorted((s["rank"], s["action"], s["start"], s["end"]) for s in found) == expected(timeline)
    rows = {s["rank"]: s["y"] for s in found}
    assert sorted(rows, key=rows.__getitem__) == [0, 1, 2, 3]
    scale = found[0]["width"] / (found[0]["end"] - found[0]["start"])
    for box in found:
        assert box["width"] == pytest.approx((box["end"] - box["start"]) * scale, abs=0.01)
        under = page.evaluate("([x, y]) => penstock.spanAt(x, y)", list(centre(box)))
        assert (under["rank"], under["action"]) == (box["rank"], box["action"])


def test_copies_are_drawn_below_their_rank(open_page: Open, copied: Plan) -> None:
    timeline = simulate(copied)
    page = open_page(to_html(timeline))
    found = {s["action"]: s for s in spans(page)}
    assert sorted((s["rank"], s["action"], s["start"], s["end"]) for s in found.values()) == expected(timeline)
    for action, box in found.items():
        copy = action[1] in "OL"
        assert (box["y"] > found[f"{action[0]}F0"]["y"]) == copy, action
        assert not copy or box["y"] + box["height"] < found["1F0"]["y"]
        under = page.evaluate("([x, y]) => penstock.spanAt(x, y)", list(centre(box)))
        assert (under["rank"], under["action"]) == (box["rank"], action)
    hover(page, "0O1")
    assert "needs 0F1 on rank 0" in page.locator(".ps-tip").inner_text()
    assert "needed by 0L1 on rank 0" in page.locator(".ps-tip").inner_text()


def test_boxes_are_painted_with_the_colour_of_their_action(open_page: Open) -> None:
    timeline = simulate(get_schedule("zb-h1")(4, 6))
    page = open_page(to_html(timeline))
    by_text = {str(s.action): s.action for rank in range(4) for s in timeline.spans(rank)}
    for box in spans(page):
        fill = paint(by_text[box["action"]].op).fill
        seen = pixel(page, box["x"] + 4, box["y"] + box["height"] - 4)
        assert seen[:3] == tuple(bytes.fromhex(fill[1:])), box["action"]


def test_hover_shows_times_and_what_needs_what(open_page: Open) -> None:
    timeline = simulate(get_schedule("1f1b")(4, 8))
    page = open_page(to_html(timeline))
    tip = page.locator(".ps-tip")
    assert tip.is_hidden()
    hover(page, "2F3")
    text = tip.inner_text()
    assert text.splitlines()[:2] == ["2F3", "forward, stage 2, microbatch 3"]
    assert "rank 2, 11 to 12, takes 1" in text
    assert "needs 1F3 on rank 1, done at 11" in text
    assert "needed by 3F3 on rank 3, starts at 12" in text
    assert "needed by 2B3 on rank 2" in text
    page.mouse.move(5, 5)
    settle(page)
    assert tip.is_hidden()


def test_dependencies_are_those_of_the_rules_on_every_span(open_page: Open) -> None:
    """Both directions, for a plan with I, W and B: every edge of the rules, once from each end."""
    timeline = simulate(get_schedule("zbv")(4, 6))
    page = open_page(to_html(timeline))
    seen = {box["action"]: page.evaluate("([x, y]) => penstock.spanAt(x, y)", list(centre(box))) for box in spans(page)}
    texts = set(seen)
    edges = set()
    for rank in range(4):
        for action in timeline.plan.actions(rank):
            for need in timeline.plan.rules.requires(action):
                name = str(need) if str(need) in texts else str(need).replace("I", "B")
                edges.add((name, str(action)))
    assert {(need, action) for action, box in seen.items() for need in box["needs"]} == edges
    assert {(action, user) for action, box in seen.items() for user in box["neededBy"]} == edges


def test_focus_dims_what_has_nothing_to_do_with_it(open_page: Open) -> None:
    page = open_page(to_html(simulate(get_schedule("1f1b")(4, 8))))
    other, needed = span(page, "0F7"), span(page, "1F3")
    points = [(box["x"] + 4, box["y"] + box["height"] - 4) for box in (other, needed)]
    before = [pixel(page, *point) for point in points]
    hover(page, "2F3")
    after = [pixel(page, *point) for point in points]
    assert after[0] != before[0]
    assert after[1] == before[1]


def test_messages_lead_from_one_rank_to_the_other(open_page: Open, lowered: Timeline) -> None:
    page = open_page(to_html(lowered))
    assert sorted((s["rank"], s["action"], s["start"], s["end"]) for s in spans(page)) == expected(lowered)
    hover(page, "2F3")
    text = page.locator(".ps-tip").inner_text()
    assert "needs 1F3 on rank 1" in text
    assert "message" in text
    box = page.locator(".ps-messages")
    assert box.is_checked()
    box.uncheck()
    settle(page)


def test_overlapped_pairs_hold_two_actions(open_page: Open, overlapped: Plan) -> None:
    page = open_page(to_html(overlapped))
    box = span(page, "(0F1;3B0)OVERLAP_F_B")
    upper = pixel(page, box["x"] + 3, box["y"] + 3)
    lower = pixel(page, box["x"] + 3, box["y"] + box["height"] - 3)
    assert upper != lower
    hover(page, "(0F1;3B0)OVERLAP_F_B")
    text = page.locator(".ps-tip").inner_text()
    assert "forward, stage 0, microbatch 1" in text
    assert "backward, stage 3, microbatch 0" in text
    assert "needs 3F0 on rank 0" in text


def test_wheel_buttons_and_keys_zoom_and_drag_pans(open_page: Open) -> None:
    page = open_page(to_html(simulate(get_schedule("1f1b")(4, 8))))
    assert window(page) == (0, 33)
    box = span(page, "2F5")
    page.mouse.move(*centre(box))
    page.mouse.wheel(0, -400)
    page.wait_for_function("penstock.views[0].to - penstock.views[0].from < 20")
    near = span(page, "2F5")
    assert centre(near)[0] == pytest.approx(centre(box)[0], abs=1.0), "what is under the pointer stays there"
    assert near["width"] > 1.5 * box["width"]

    start = window(page)
    page.mouse.down()
    page.mouse.move(centre(box)[0] - 120, centre(box)[1], steps=4)
    page.mouse.up()
    assert window(page)[0] > start[0]
    assert window(page)[1] - window(page)[0] == pytest.approx(start[1] - start[0])

    page.locator('[data-ps-do="fit"]').click()
    assert window(page) == (0, 33)
    page.locator('[data-ps-do="in"]').click()
    assert window(page) == pytest.approx((5.5, 27.5))
    page.locator(".ps-plots").focus()
    page.keyboard.press("ArrowRight")
    assert window(page) == pytest.approx((9.9, 31.9))
    page.keyboard.press("-")
    assert window(page) == pytest.approx((0, 33))
    page.keyboard.press("+")
    page.keyboard.press("0")
    assert window(page) == (0, 33)


def test_a_click_pins_and_escape_lets_go(open_page: Open) -> None:
    page = open_page(to_html(simulate(get_schedule("1f1b")(4, 8))))
    page.mouse.click(*centre(span(page, "2F3")))
    hover(page, "0F0")
    assert page.locator(".ps-tip .ps-name").inner_text() == "2F3"
    page.locator(".ps-plots").press("Escape")
    assert page.locator(".ps-tip").is_hidden()


def test_the_wheel_scrolls_the_page_when_there_is_nothing_to_zoom_out(open_page: Open) -> None:
    page = open_page(to_html(simulate(get_schedule("1f1b")(40, 8))), height=500)
    page.mouse.move(600, 400)
    page.mouse.wheel(0, 200)
    page.wait_for_function("scrollY > 100")
    assert window(page)[0] == 0


def test_dark_and_light_follow_the_system_and_the_button(open_page: Open) -> None:
    def brightness(page: Any) -> int:
        box = span(page, "3F0")
        return sum(pixel(page, box["x"] - 20, box["y"] + 8)[:3])  # idle, before the first action of the last rank

    background = "getComputedStyle(document.body).backgroundColor"
    text = to_html(simulate(get_schedule("1f1b")(4, 8)))
    light, dark = open_page(text), open_page(text, scheme="dark")
    assert brightness(light) > 600 > 250 > brightness(dark)
    assert light.evaluate(background) != dark.evaluate(background)
    dark.locator("[data-ps-theme]").click()
    settle(dark)
    assert brightness(dark) == brightness(light)
    assert light.evaluate(background) == dark.evaluate(background)
    light.emulate_media(color_scheme="dark")
    settle(light)
    assert brightness(light) < 250


def test_two_timelines_share_one_axis(open_page: Open) -> None:
    plan = get_schedule("1f1b")(4, 8)
    planned = simulate(plan)
    starts, ends = (
        tuple([time * 1.5 + 100 for time in row] for row in rows) for rows in (planned.starts, planned.ends)
    )
    measured = Timeline(plan, starts, ends, measured=True)
    page = open_page(to_html([("planned", planned), ("measured", measured)]))
    first, second = span(page, "2F3", "planned"), span(page, "2F3", "measured")
    assert second["width"] == pytest.approx(1.5 * first["width"], rel=1e-3)
    assert span(page, "0F0", "planned")["x"] == pytest.approx(span(page, "0F0", "measured")["x"])
    assert second["y"] > first["y"] + 4 * first["height"]
    assert page.locator("canvas.ps-memory").count() == 1, "nothing is known of the memory of the other"
    page.locator('[data-ps-do="in"]').click()
    settle(page)
    assert span(page, "2F3", "measured")["width"] == pytest.approx(
        1.5 * span(page, "2F3", "planned")["width"], rel=1e-3
    )


def test_names_from_outside_are_only_text(open_page: Open) -> None:
    timeline = simulate(replace(get_schedule("1f1b")(2, 2), name=NASTY))
    page = open_page(to_html([(NASTY, replace(timeline, unit=NASTY))], title=NASTY))
    assert page.title() == " ".join(NASTY.split())
    assert page.locator("h1").inner_text() == NASTY
    assert page.locator("h2").inner_text() == NASTY
    assert page.locator("img").count() == 0
    hover(page, "0F0")
    assert NASTY in page.locator(".ps-tip").inner_text()
    assert spans(page)[0]["timeline"] == NASTY


def test_a_hundred_thousand_spans_stay_quick(open_page: Open) -> None:
    timeline = simulate(get_schedule("1f1b")(64, 800))
    page = open_page(to_html(timeline))
    assert page.evaluate("penstock.views[0].blocks[0].model.size") == 102_400
    quick = """(limit) => {  // one quick frame shows what drawing takes, a slow one only that others were busy
        for (let i = 0; i < 100; i++) {
            const start = performance.now();
            penstock.views[0].draw();
            if (performance.now() - start < limit) return true;
        }
        return false;
    }"""
    assert page.evaluate(quick, 400)
    page.evaluate("penstock.views[0].zoom(300)")
    settle(page)
    assert page.evaluate(quick, 200)
    middle = page.evaluate("() => { const b = penstock.views[0].blocks[0].rows.getBoundingClientRect(); return b.y }")
    under = page.evaluate("([x, y]) => penstock.spanAt(x, y)", [500, middle + 30])
    assert under["rank"] == 0
    assert window(page)[0] <= under["end"] <= window(page)[1] + 2


def test_shares_are_honest_where_boxes_are_too_thin(open_page: Open) -> None:
    """Zoomed out, a column of 1F1B's steady state is a third forward and two thirds backward, not one or the other."""
    page = open_page(to_html(simulate(get_schedule("1f1b")(4, 2000))))
    first = page.evaluate("penstock.spans()[0]")
    top, height = first["y"], first["height"]
    colours = [pixel(page, 600, top + height * (i + 0.5) / 16)[:3] for i in range(16)]
    assert colours.count((47, 111, 219)) == pytest.approx(16 / 3, abs=1)
    assert colours.count((13, 138, 104)) == pytest.approx(32 / 3, abs=1)


def test_a_narrow_window_keeps_everything_inside(open_page: Open) -> None:
    page = open_page(to_html(simulate(get_schedule("zbv")(4, 6))), width=400, height=800)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert all(s["x"] >= 0 and s["x"] + s["width"] <= 400 for s in spans(page))
    page.set_viewport_size({"width": 1000, "height": 800})
    settle(page)
    settle(page)
    assert max(s["x"] + s["width"] for s in spans(page)) > 500


def test_sections_can_stand_in_any_page(open_page: Open) -> None:
    sections: Sequence[Any] = [
        timeline_section([(name, simulate(get_schedule(name)(2, 4)))]) for name in ("1f1b", "gpipe")
    ]
    body = "<h1>a report</h1>" + "".join(section.html for section in sections)
    page = open_page(whole_page("report", body, style_text=sections[0].style, script_text=sections[0].script))
    assert {s["timeline"] for s in spans(page)} == {"1f1b", "gpipe"}
    assert page.evaluate("penstock.views.length") == 2
