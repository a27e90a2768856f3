"""The page with Python inside it: a folder for any web server, which then only hands out files."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from typing import Final

from penstock.errors import PenstockError
from penstock.studio import page

PLANNING: Final = ("plan", "schedules", "lower", "simulate", "show", "studio")
_OF_PYODIDE: Final = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")


def build(folder: str | Path, pyodide: str | Path) -> Path:
    """Write the page into a folder; `pyodide` is the folder of the npm package of that name.

    build("site/studio", "node_modules/pyodide")
    """
    place, given = Path(folder), Path(pyodide)
    if missing := [name for name in _OF_PYODIDE if not (given / name).is_file()]:
        raise PenstockError(
            f"{given} has no {missing[0]}; expected the npm package pyodide: `npm install pyodide`, then node_modules/pyodide"
        )
    (place / "pyodide").mkdir(parents=True, exist_ok=True)
    for name in _OF_PYODIDE:
        shutil.copyfile(given / name, place / "pyodide" / name)
    for name, text in {**page.files(), "index.html": page.index()}.items():
        (place / name).write_text(text, encoding="utf-8")
    shutil.copyfile(Path(__file__).with_name("worker.mjs"), place / "worker.mjs")
    _bundle(place / "planning.zip")
    return place / "index.html"


def _bundle(archive: Path) -> None:
    """The planning half as a zip file; the same files give the same bytes."""
    home = Path(__file__).parents[1]
    kept = sorted(home.glob("*.py"))  # some of these need torch, and nobody here imports them
    kept += [path for name in PLANNING for path in (home / name).iterdir() if path.suffix in (".py", ".js", ".css")]
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as made:
        for path in sorted(kept):
            entry = zipfile.ZipInfo(str(Path("penstock") / path.relative_to(home)))
            made.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
