"""The page on the design names rooms and files that are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "penstock"
PAGE = (ROOT / "docs" / "concepts" / "design.md").read_text(encoding="utf-8")


def test_the_tree_has_every_room() -> None:
    tree = PAGE[PAGE.index("    src/penstock/") : PAGE.index("Folders are one level deep")]
    told = set(re.findall(r"^      (\w+)(?:/|\.py) ", tree, re.MULTILINE))
    there = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert told == there - {"__main__"}


def test_every_file_that_is_named_is_there() -> None:
    """With its room, or without it where the sentence has said which one it is about."""
    named = [file for text in re.findall(r"`([\w./{},-]+\.(?:py|js))`", PAGE) for file in spelt_out(text)]
    assert len(named) > 50
    known = {path.name for folder in (SOURCE, ROOT / "tests") for path in folder.rglob("*.*")}
    missing = [
        file
        for file in named
        if not ((SOURCE / file).exists() or (ROOT / file).exists() if "/" in file else file in known)
    ]
    assert not missing


def spelt_out(text: str) -> list[str]:
    """`a/{b,c}.py` is two files."""
    found = re.fullmatch(r"(.*)\{(.*)\}(.*)", text)
    return [text] if found is None else [f"{found[1]}{part}{found[3]}" for part in found[2].split(",")]
