"""The examples of docs/how-to-cut.md run, in order, as one program; what the page shows is what they print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "how-to-cut.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"(?:^    .*\n)+", re.MULTILINE)


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": "how_to_cut"}
    for block in BLOCK.finditer(text):
        lines_before = text.count("\n", 0, block.start(1))
        exec(compile("\n" * lines_before + block[1], str(PAGE), "exec"), names)
    printed = " ".join(capsys.readouterr().out.split())
    shown = SHOWN.findall(BLOCK.sub("", text))
    assert len(shown) == 2
    for part in shown:
        assert " ".join(part.split()) in printed
