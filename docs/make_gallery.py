"""Draw every schedule into docs/gallery.md and docs/gallery/: `python docs/make_gallery.py`, or `make docs`."""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / "src"))  # the code beside this page, wherever another penstock is installed

from penstock.show.gallery import gallery  # noqa: E402  after the line that says where it is


def main(folder: Path = DOCS) -> None:
    files = gallery()
    (folder / "gallery").mkdir(parents=True, exist_ok=True)
    for old in (folder / "gallery").glob("*.svg"):
        if f"gallery/{old.name}" not in files:
            old.unlink()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    sys.stdout.write(f"drew {len(files) - 1} schedules into {folder / 'gallery.md'}\n")


if __name__ == "__main__":
    main()
