"""The page with Python inside it: a folder that opens as it lies there, or from any web server."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from base64 import b64encode
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
    place.mkdir(parents=True, exist_ok=True)
    python = {name: (given / name).read_bytes() for name in _OF_PYODIDE} | {"planning.zip": bundle()}
    for name, text in {**page.files(), "index.html": page.index(), "python.js": _as_script(python)}.items():
        (place / name).write_text(text, encoding="utf-8")
    return place / "index.html"


def _as_script(files: dict[str, bytes]) -> str:
    """Files inside a script: a page that lies in a folder may load scripts from there, and nothing else."""
    packed = {name: b64encode(gzip.compress(data, mtime=0)).decode() for name, data in files.items()}
    worker = Path(__file__).with_name("worker.mjs").read_text(encoding="utf-8")
    return f"globalThis.penstockPython = {json.dumps({'worker': worker, 'files': packed})};\n"


def bundle() -> bytes:
    """The planning half as a zip file; the same files give the same bytes."""
    home = Path(__file__).parents[1]
    kept = sorted(home.glob("*.py"))  # some of these need torch, and nobody here imports them
    kept += [path for name in PLANNING for path in (home / name).iterdir() if path.suffix in (".py", ".js", ".css")]
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as made:
        for path in sorted(kept):
            entry = zipfile.ZipInfo(str(Path("penstock") / path.relative_to(home)))
            made.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return held.getvalue()
