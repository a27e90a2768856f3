"""The site: built without a warning, opened from its folder in a real browser, every page and every link inside it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urlparse

import pytest

from tests.show.conftest import PATIENCE, browser  # noqa: F401 - a fixture

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.xdist_group("site"), pytest.mark.timeout(300)]

READ = """() => ({
    links: [...document.querySelectorAll("a[href]")].map((a) => a.href),
    ids: [...document.querySelectorAll("[id]")].map((e) => e.id),
    missing: [...document.images].filter((i) => i.complete && !i.naturalWidth).map((i) => i.src),
})"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@dataclass
class Visit:
    """A browser tab that keeps what went wrong, and what was asked for beyond the folder."""

    page: Any
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on(
            "request",
            lambda asked: None if asked.url.startswith(("file:", "blob:")) else self.complaints.append(asked.url),
        )


@pytest.fixture
def visit(browser: Any) -> Iterator[Visit]:  # noqa: F811
    made = Visit(browser.new_page(viewport={"width": 1280, "height": 900}))
    made.page.set_default_timeout(PATIENCE)
    yield made
    made.page.close()
    assert made.complaints == []


def test_every_page_opens_and_every_link_leads_somewhere(site: Path, visit: Visit) -> None:
    pages = {file: {} for file in sorted(site.rglob("*.html")) if file.name != "404.html"}
    assert len(pages) > 30
    for file in pages:
        visit.page.goto(file.as_uri())
        pages[file] = visit.page.evaluate(READ)
    broken = []
    for file, found in pages.items():
        broken += [f"{file.name} shows {picture}, which is not there" for picture in found["missing"]]
        for link in set(found["links"]):
            address, anchor = urldefrag(link)
            if urlparse(address).scheme != "file":
                continue
            there = Path(unquote(urlparse(address).path))
            if not there.is_file():
                broken.append(f"{file.name} links to {there}, which is not there")
            elif anchor and there in pages and unquote(anchor) not in pages[there]["ids"]:
                broken.append(f"{file.name} links to {there.name}#{anchor}, which is not there")
    assert broken == []


def test_a_reader_clicks_from_page_to_page_and_searches(site: Path, visit: Visit) -> None:
    page = visit.page
    page.goto((site / "index.html").as_uri())
    assert not page.locator(".md-sidebar--primary").is_visible(), "the page itself is the table of contents"
    assert page.locator(".home li strong a").count() == page.locator(".home li").count() > 20, "a card for each page"
    for group, heading in (
        ("Guides", "How to cut a model"),
        ("Reference", "Reference"),
        ("Gallery", "Gallery of schedules"),
    ):
        page.locator(".md-tabs").get_by_role("link", name=group).click()
        page.locator("h1", has_text=heading).wait_for()
    page.locator(".md-search__input").click()
    page.locator(".md-search__input").press_sequentially("deadlock", delay=20)  # the theme listens to keys
    page.locator(".md-search-result__item").first.wait_for()
    page.locator(".md-search-result__item a").first.click()
    page.locator("article.md-content__inner", has_text="deadlock").wait_for()
    if (site / "studio").is_dir():  # where npm is
        page.goto((site / "index.html").as_uri())
        page.get_by_role("link", name="Open the planner").click()
        page.locator("#rows tr").first.wait_for()  # planned by the page itself, without a server
