"""How soon the planner page shows a change: 8 ranks x 32 microbatches, in a real chromium.

    python benchmarks/studio.py

From the event of the changed control to the frame in which the picture is there, with the server behind the page and, where
`make docs` has fetched Pyodide, with Python inside it. Needs chromium and playwright (`make test` installs both).
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from playwright.sync_api import sync_playwright

from penstock.studio.server import Studio
from penstock.studio.static import build

PYODIDE = Path(sys.prefix) / "pyodide" / "node_modules" / "pyodide"
START = "schedule=zbv&ranks=8&microbatches=32"
CHANGES = {  # a control, and the values that it is set to in turn
    "ranks": ("7", "8"),
    "microbatches": ("31", "32"),
    "schedule": ("interleaved1f1b", "zbv"),
    "memory": ("6", "9"),
    "latency": ("0.2", "0"),
    "links": ("3-4=2", ""),
}
REACT = """async ([name, value]) => {
    const field = document.getElementById("question").elements[name];
    const before = document.body.dataset.shown;
    const began = performance.now();
    field.value = value;
    field.dispatchEvent(new Event("input", { bubbles: true }));
    while (document.body.dataset.shown === before) await new Promise((done) => setTimeout(done, 1));
    await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    return performance.now() - began;
}"""


@contextmanager
def served(kind: str) -> Iterator[str]:
    if kind == "server":
        with Studio() as studio:
            thread = threading.Thread(target=studio.serve)
            thread.start()
            yield studio.address
            studio.stop()
            thread.join(10)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield build(folder, PYODIDE).as_uri()


def measure(page: Any, rounds: int = 5) -> None:
    for name, values in CHANGES.items():
        took = [page.evaluate(REACT, [name, value]) for _ in range(rounds) for value in values]
        print(f"  {name:<13} median {median(took):4.0f} ms, longest {max(took):4.0f} ms")


def main() -> None:
    with sync_playwright() as playwright:
        path = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for kind in ("server", *(["pyodide"] if PYODIDE.is_dir() else [])):
            with served(kind) as address:
                page = browser.new_page(viewport={"width": 1400, "height": 900})
                page.goto(f"{address}#{START}")
                page.locator("#rows tr").first.wait_for(timeout=120_000)
                print(kind)
                measure(page)
                page.close()
        browser.close()


if __name__ == "__main__":
    main()
