"""The checkpoints of a run: the newest under its own name, older ones beside it as NAME.step-100.

    run/checkpoint                 the newest whole one
    run/checkpoint.step-200        the one before, and so on; as many as `keep` says
    run/checkpoint.saving          one that is being written, or whose writer was killed

A new one is written as NAME.saving. When all of it is on the disk, the newest becomes NAME.step-N and NAME.saving
becomes NAME: two renames. Whoever is killed between them leaves NAME.step-N, which `candidates` finds.

Every change on disk is one small method of a `Disk`. Tests put one in its place that fails, or kills the process, at its nth act.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import BinaryIO

from penstock.checkpoint.manifest import FILE, Manifest
from penstock.errors import PenstockError, RunError

SAVING = ".saving"
DELETING = ".deleting"  # the end of the name of a folder that is on its way out
_UNREADABLE = ".unreadable"


class Disk:
    """The real one. A folder that a reader may look at is only ever renamed, never changed in place."""

    def make_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True)

    def create(self, file: Path) -> BinaryIO:
        return file.open("xb")

    def write(self, stream: BinaryIO, data: bytes | memoryview) -> None:
        stream.write(data)

    def finish(self, stream: BinaryIO) -> None:
        """Close a file whose contents are on the disk."""
        with stream:
            stream.flush()
            os.fsync(stream.fileno())

    def write_file(self, file: Path, data: bytes) -> None:
        with self.create(file) as stream:
            self.write(stream, data)
            self.finish(stream)

    def rename(self, old: Path, new: Path) -> None:
        old.rename(new)

    def sync_folder(self, folder: Path) -> None:
        """The names in a folder are on the disk too. Where folders cannot be opened (Windows), the system sees to it."""
        if os.name == "posix":
            number = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(number)
            finally:
                os.close(number)

    def remove(self, folder: Path) -> None:
        """First the name goes, then the contents: a reader never sees half of it."""
        gone = folder.with_name(folder.name + DELETING)
        self.clear(gone)
        if folder.exists():
            self.rename(folder, gone)
            self.clear(gone)

    def clear(self, folder: Path) -> None:
        """Delete what nobody reads."""
        shutil.rmtree(folder, ignore_errors=True)


def older(place: Path) -> list[Path]:
    """The older ones beside a checkpoint, newest first."""
    pattern = re.compile(re.escape(place.name) + r"\.step-(\d{1,18})")
    names = {path: pattern.fullmatch(path.name) for path in (place.parent.iterdir() if place.parent.is_dir() else ())}
    found = [(int(name[1]), path) for path, name in names.items() if name is not None and (path / FILE).is_file()]
    return [path for _, path in sorted(found, reverse=True)]


def candidates(place: Path) -> list[Path]:
    """The checkpoint of that name and the older ones, newest first; an error if there is none."""
    try:
        found = [place] if (place / FILE).is_file() else []
        found += older(place)
    except OSError as error:
        raise RunError(f"{place} cannot be read: {error.strerror}") from error
    if not found:
        raise RunError(f"{place} is no checkpoint: it has no {FILE}; give the folder that pipe.save() was given")
    return found


def begin(place: Path, disk: Disk) -> Path:
    """An empty folder to write into."""
    if place.exists() and not (place / FILE).is_file() and not (place.is_dir() and not any(place.iterdir())):
        raise RunError(
            f"{place} exists and is no checkpoint; penstock does not replace it. Give the name of a new folder"
        )
    fresh = place.with_name(place.name + SAVING)
    for leftover in place.parent.glob(f"{place.name}*{DELETING}"):
        disk.clear(leftover)
    disk.remove(fresh)
    disk.make_folder(fresh)
    return fresh


def publish(fresh: Path, place: Path, disk: Disk, *, keep: int) -> None:
    """Give what was written its name, keep the one before, and let the oldest go."""
    disk.sync_folder(fresh)
    if place.is_dir() and not any(place.iterdir()):
        disk.clear(place)
    if place.exists():
        before = _name_of_old(place)
        disk.remove(before)
        disk.rename(place, before)
    disk.rename(fresh, place)
    disk.sync_folder(place.parent)
    for path in older(place)[keep - 1 :]:
        disk.remove(path)


def _name_of_old(place: Path) -> Path:
    try:
        return place.with_name(f"{place.name}.step-{Manifest.read(place).step}")
    except PenstockError:
        return place.with_name(place.name + _UNREADABLE)


def put_aside(place: Path, disk: Disk) -> Path | None:
    """An earlier run's: its newest is kept as NAME.before, and nothing goes on from it by mistake."""
    for path in (*older(place), place.with_name(place.name + SAVING)):
        disk.remove(path)
    if not place.exists():
        return None
    before = place.with_name(f"{place.name}.before")
    disk.remove(before)
    disk.rename(place, before)
    return before
