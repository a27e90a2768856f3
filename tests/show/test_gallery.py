"""The gallery: made for every schedule, and the committed one is what the code makes now."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.schedules import all_schedules
from penstock.show.gallery import gallery

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return gallery()


def test_every_schedule_has_a_picture_and_figures(made: dict[str, str]) -> None:
    page = made["gallery.md"]
    for recipe in all_schedules():
        assert f"gallery/{recipe.name}.svg" in made
        assert f"](gallery/{recipe.name}.svg)" in page
        assert f"| [{recipe.name}](#{recipe.name}) |" in page
    assert len(made) == len(all_schedules()) + 1


def test_the_committed_gallery_is_up_to_date(made: dict[str, str]) -> None:
    stale = [
        name for name, text in made.items() if not (DOCS / name).exists() or (DOCS / name).read_text("utf-8") != text
    ]
    assert stale == [], "run `make docs` and commit what it draws"
    assert {f"gallery/{path.name}" for path in (DOCS / "gallery").iterdir()} == set(made) - {"gallery.md"}
