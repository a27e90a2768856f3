"""The planner page in a real browser: with the server behind it, and with Python inside it."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.studio.server import Studio
from penstock.studio.static import build
from tests.show.conftest import PATIENCE, browser  # noqa: F401 - a fixture

PYODIDE = Path(sys.prefix) / "pyodide" / "node_modules" / "pyodide"
pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("studio"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module", params=["server", "pyodide"])
def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of the server, or of the page that carries its own Python, as it lies in its folder."""
    if request.param == "server":
        with Studio() as studio:
            thread = threading.Thread(target=studio.serve)
            thread.start()
            yield studio.address
            studio.stop()
            thread.join(10)
        return
    if not PYODIDE.is_dir():
        pytest.skip(f"{PYODIDE} is not there: `make test` fetches it, where npm is")
    folder = tmp_path_factory.mktemp("studio")
    build(folder, PYODIDE)
    yield f"{folder.as_uri()}/"


@pytest.fixture(scope="module")
def opened(browser: Any, address: str) -> Iterator[Any]:  # noqa: F811
    """The page, loaded once: Python takes its time to start in it."""
    complaints: list[str] = []
    made = browser.new_page(viewport={"width": 1400, "height": 900})
    made.set_default_timeout(PATIENCE)
    made.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    made.on("pageerror", lambda error: complaints.append(f"error: {error}"))
    made.on(
        "request",
        lambda asked: None if asked.url.startswith((address, "blob:", "data:")) else complaints.append(asked.url),
    )
    made.goto(f"{address}index.html" if address.startswith("file:") else address)
    made.locator("#rows tr").first.wait_for()
    yield made
    made.close()
    assert complaints == []


@pytest.fixture
def page(opened: Any, request: pytest.FixtureRequest) -> Any:
    """The page with its first question, which stands in the address of every test anew."""
    opened.evaluate("(name) => { location.hash = `test=${encodeURIComponent(name)}`; }", request.node.name)
    shown(opened, schedule="zbv", ranks=4, microbatches=8, latency=0, transfer=0)
    opened.locator("#problem").wait_for(state="hidden")
    return opened


def shown(page: Any, **expected: Any) -> dict[str, Any]:
    """Wait until the picture is that of the question; its question and figures."""
    page.wait_for_function(
        "(wanted) => { const now = JSON.parse(document.body.dataset.shown); "
        "return Object.entries(wanted).every(([name, value]) => JSON.stringify(now[name]) === JSON.stringify(value)); }",
        arg=expected,
    )
    found: dict[str, Any] = json.loads(page.evaluate("document.body.dataset.shown"))
    return found


def test_every_control_changes_the_picture(page: Any) -> None:
    first = shown(page, schedule="zbv", ranks=4)
    assert page.evaluate("penstock.spans().length") == 4 * 8 * 2 * 3
    page.fill("[name=ranks]", "8")
    page.fill("[name=microbatches]", "32")
    larger = shown(page, ranks=8, microbatches=32)
    assert larger["makespan"] != first["makespan"]
    assert page.evaluate("new Set(penstock.spans().map((span) => span.rank)).size") == 8
    page.fill("[name=latency]", "0.5")
    assert float(shown(page, latency=0.5)["makespan"]) > float(larger["makespan"])
    page.fill("[name=latency]", "0")
    page.fill("[name=links]", "3-4=9")
    assert float(shown(page, latency=0, links=["3-4=9"])["makespan"]) > float(larger["makespan"])
    assert "links=3-4%3D9" in page.url
    page.fill("[name=links]", "")
    page.fill("[name=transfer]", "0.5")
    assert float(shown(page, transfer=0.5)["makespan"]) > float(larger["makespan"])
    page.select_option("[name=schedule]", "1f1b")
    assert page.evaluate("penstock.spans().length") >= shown(page, schedule="1f1b")["ranks"] * 32 * 2


def test_the_comparison_heeds_memory_and_picks_a_schedule(page: Any) -> None:
    page.fill("[name=memory]", "3")
    page.locator("#rows tr.st-too-large").first.wait_for()
    best = page.locator("#rows tr").first.locator("button").inner_text()
    assert best not in ("zbv", "gpipe")
    page.locator("#rows tr").first.click()
    shown(page, schedule=best)
    assert f"schedule={best}" in page.url
    page.locator("#scatter circle[data-schedule=gpipe]").click()
    shown(page, schedule="gpipe")
    assert "A rank holds 8 at its peak, more than the limit of 3." in page.locator("#timeline").inner_text()


OVERLAPS = """() => {
    const boxes = [...document.querySelectorAll("#scatter :is(text, circle)")].map((e) => [e, e.getBBox()]);
    const meet = (a, b) => a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height;
    const words = boxes.filter(([e]) => e.tagName === "text");
    return words.flatMap(([e, a]) => boxes.filter(([f, b]) => e !== f && meet(a, b)).map(([f]) => e.textContent + f.textContent));
}"""


def test_names_stand_apart_and_nothing_is_wider_than_a_telephone(page: Any) -> None:
    """Two schedules that are equally good were written over one another, and the table ran out of its card."""
    page.locator("#scatter text", has_text="interleavedzerobubble, zbv").wait_for()
    assert page.evaluate(OVERLAPS) == []
    size = page.viewport_size
    page.set_viewport_size({"width": 390, "height": 800})
    try:
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        table, card = (page.locator(at).bounding_box() for at in (".st-compare table", ".st-compare"))
        assert table["x"] + table["width"] <= card["x"] + card["width"]
    finally:
        page.set_viewport_size(size)


def test_what_cannot_be_is_said_and_the_page_goes_on(page: Any) -> None:
    page.fill("[name=speeds]", "1, 2")
    page.locator("#problem:not([hidden])").wait_for()
    assert "2 speeds for 4 ranks" in page.locator("#problem").inner_text()
    page.fill("[name=speeds]", "1, 1, 2, 1")
    page.locator("#problem").wait_for(state="hidden")
    assert float(shown(page, ranks=4)["makespan"]) > 40


def test_files_can_be_saved(page: Any) -> None:
    with page.expect_download() as waiting:
        page.locator("[data-save=csv]").click()
    assert waiting.value.suggested_filename == "zbv.csv"
    assert Path(waiting.value.path()).read_text(encoding="utf-8").startswith("0F0,")
