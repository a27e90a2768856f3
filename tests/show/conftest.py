"""What the tests of drawings share: plans that show everything, and a real browser."""

from __future__ import annotations

import atexit
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.lower import lower
from penstock.plan import Plan
from penstock.schedules import get_schedule
from penstock.simulate import Costs, Timeline, simulate

NASTY = "</script><script>document.title='hacked'</script><img src=x onerror=alert(1)> \"quoted' & <b>"
PATIENCE = 90_000  # milliseconds that a page may take to show something, on a machine that does much else
CHROMIUM_OPTIONS = (
    "--no-sandbox",
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture
def overlapped() -> Plan:
    """Two ranks in a V, with overlapped pairs; checked by hand against the rules."""
    return Plan.of(
        [
            ["0F0", "3F0", "(0F1;3B0)OVERLAP_F_B", "3F1", "0B0", "3B1", "0B1"],
            ["1F0", "2F0", "2B0", "(1F1;1B0)OVERLAP_F_B", "2F1", "2B1", "1B1"],
        ],
        name="overlapped",
    )


@pytest.fixture
def copied() -> Plan:
    """Two ranks, the first of which moves what two forwards saved off the device and back."""
    return Plan.of(
        [
            ["0F0", "0O0", "0F1", "0O1", "0F2", "0L0", "0B0", "0L1", "0B1", "0B2"],
            ["1F0", "1R0", "1B0", "1F1", "1B1", "1F2", "1B2"],
        ],
        name="copied",
    )


@pytest.fixture
def lowered() -> Timeline:
    """A lowered plan with messages that take time, a reduction at the end, and times in seconds."""
    plan = lower(get_schedule("1f1b")(4, 6), reduce=True)
    return replace(simulate(plan, replace(Costs.unit(plan), latency=0.25, reduce_grad=0.5)), unit="s", measured=True)


@pytest.fixture(scope="session")
def browser() -> Any:
    """A running chromium, or a skip that says why there is none."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no chromium on this machine: `apt-get install chromium`, or `make test` as root, brings it")
    api = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    # One for the whole process, whichever folder's tests ask first: playwright starts once in a process.
    running = getattr(api, "penstock_browser", None)
    if running is None:
        started = api.sync_playwright().start()
        running = started.chromium.launch(executable_path=chromium, args=list(CHROMIUM_OPTIONS))
        api.penstock_browser = running
        atexit.register(started.stop)
        atexit.register(running.close)
    return running


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Open the text of a page or drawing in the browser; at the end nothing may have been complained of or fetched."""
    complaints: list[str] = []
    opened = []

    def show(text: str, *, name: str = "page.html", width: int = 1280, height: int = 900, scheme: str = "light") -> Any:
        (tmp_path / name).write_text(text, encoding="utf-8")
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        page.set_default_timeout(PATIENCE)
        opened.append(page)
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (complaints.append("a dialog"), dialog.dismiss()))
        page.on("request", lambda r: complaints.append(r.url) if not r.url.endswith(f"/{name}") else None)
        page.goto((tmp_path / name).as_uri())
        return page

    yield show
    for page in opened:
        page.close()
    assert complaints == []
