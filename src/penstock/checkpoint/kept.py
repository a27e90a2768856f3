"""The checkpoints of a run: the newest under its own name, older ones beside it as NAME.step-100.

    run/checkpoint                      the newest whole one
    run/checkpoint.step-200             the one before, and so on; as many as `keep` says
    run/checkpoint.saving-RUN-7         one that is being written, or whose writer was killed: each writer has its own
    run/checkpoint.before               what a run left that `penstock train` did not go on from

A new one is written as NAME.saving-RUN-NUMBER. When all of it is on the disk, the newest becomes NAME.step-N and the new one
becomes NAME: two renames. Whoever is killed between them leaves NAME.step-N, which `candidates` finds: of those beside NAME the
one that was saved last, by its lineage, not by its step. Nothing that is whole is removed before another one has the name.

Two writers at once: neither sees the files of the other. A rename fails where a checkpoint is already, and a writer that finds
another newest one than when it began gives up.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from penstock.checkpoint.disk import DELETING, Disk
from penstock.checkpoint.lineage import Lineage
from penstock.checkpoint.manifest import FILE, Manifest
from penstock.errors import PenstockError, RunError

SAVING = ".saving"
_UNREADABLE, _BEFORE = ".unreadable", ".before"
_TRIES = 10  # times that another writer may be between two acts of this one
_AGAIN = r"(?:-(\d{1,9}))?"  # others had that name
_STEP = r"\.step-(\d{1,18})(?:-\d{1,9})?"


@dataclass(frozen=True)
class Claim:
    """What one writer alone writes, and what was there when it began."""

    place: Path
    fresh: Path  # the folder that it is written into
    lineage: Lineage
    seen: Lineage | None  # of the newest checkpoint


# -- what there is


def candidates(place: Path) -> list[Path]:
    """The checkpoint that was saved last and those that it came out of, newest first; an error if there is none."""
    return lines(place)[0]


def lines(place: Path) -> tuple[list[Path], list[Path]]:
    """The candidates, and the checkpoints of other lines that lie beside them."""
    try:
        listed = _listed(place)
    except OSError as error:
        raise RunError(f"{place} cannot be read: {error.strerror}") from error
    if not listed:
        raise RunError(f"{place} is no checkpoint: it has no {FILE}; give the folder that pipe.save() was given")
    first, *rest = listed
    known = [path for path in rest if listed[path] is not None]
    tip = listed[first] or next((listed[path] for path in known), None)
    line = [path for path in known if tip is not None and _came_out(tip, path, listed[path])]
    if listed[first] is None and len(line) < len(known):  # nobody can say out of which of them it came
        line = []
    return [first, *line], [path for path in rest if path not in line]


def older(place: Path) -> list[Path]:
    """The checkpoints beside one, those of its own line first, each newest first."""
    if not is_any(place):
        return []
    line, others = lines(place)
    return [path for path in (*line, *others) if path != place]


def is_any(place: Path) -> bool:
    """Whether there is a checkpoint of that name, or an older one beside it."""
    return bool(_listed(place))


def _listed(place: Path) -> dict[Path, Lineage | None]:
    """The checkpoint of that name, if it is there, and those beside it: the ones that were saved last first."""
    found: dict[Path, Lineage | None] = {}
    for path, name in _beside(place, _STEP):
        if (path / FILE).is_file():
            found[path] = Lineage.of(path, step=int(name[1]))
    ages = {path: (-1, "", 0) if one is None else (one.number, one.run, _step(path)) for path, one in found.items()}
    found = {path: found[path] for path in sorted(found, key=ages.__getitem__, reverse=True)}
    return {place: Lineage.of(place), **found} if (place / FILE).is_file() else found


def _came_out(tip: Lineage, path: Path, lineage: Lineage | None) -> bool:
    """Whether a checkpoint is of a line; where that one has no name, by the steps alone."""
    return lineage is not None and (tip.follows(lineage) if tip.is_named else _step(path) <= tip.number)


def _step(path: Path) -> int:
    found = re.search(_STEP + r"\Z", path.name)
    return -1 if found is None else int(found[1])


def _beside(place: Path, ending: str) -> Iterator[tuple[Path, re.Match[str]]]:
    """What lies beside a place under its name with such an ending."""
    pattern = re.compile(re.escape(place.name) + ending)
    for path in sorted(place.parent.iterdir()) if place.parent.is_dir() else ():
        if (name := pattern.fullmatch(path.name)) is not None:
            yield path, name


# -- a new one


def begin(place: Path, disk: Disk, lineage: Lineage) -> Claim:
    """An empty folder to write into, for the next checkpoint of a run."""
    if place.exists() and not (place / FILE).is_file() and not (place.is_dir() and not any(place.iterdir())):
        raise RunError(
            f"{place} exists and is no checkpoint; penstock does not replace it. Give the name of a new folder"
        )
    listed = _listed(place)
    newest = next(iter(listed.values()), None)
    if newest is not None and lineage.run in (run for run, _ in newest.ancestors):
        raise RunError(
            f"{place} is of a run that went on from this one, and has saved since; this one would put its own in the place "
            "of that. End whichever of the two should not run, load the checkpoint to go on from it, or give another folder"
        )
    made = lineage.next(max((one.number for one in listed.values() if one is not None), default=0))
    for leftover, _ in _beside(place, f".*{re.escape(DELETING)}"):
        disk.clear(leftover)
    clear_unfinished(place, disk, of=made)
    fresh = _free(place.with_name(f"{place.name}{SAVING}-{made.run}-{made.number}"))
    disk.make_folder(fresh)
    return Claim(place, fresh, made, newest)


@contextmanager
def written_to(fresh: Path) -> Iterator[None]:
    """Around what a writer does in its folder, which a run that went on from an earlier checkpoint takes for a leftover."""
    try:
        yield
    except FileNotFoundError as error:
        if fresh.exists():
            raise
        raise RunError(
            f"{fresh} is gone: another run saves to the same place, and has removed it. Let one run at a time save to a folder: "
            "end the other one, or give this one another folder"
        ) from error


def publish(claim: Claim, disk: Disk, *, keep: int) -> None:
    """Give what was written its name, keep the one before, and let the oldest go."""
    place, fresh = claim.place, claim.fresh
    disk.sync_folder(fresh)
    for _ in range(_TRIES):
        if next(iter(_listed(place).values()), None) != claim.seen:
            break
        late = [path for path in _saving(place) if path != fresh]  # whoever has begun by now finds another newest one
        with _contested() as done:
            if place.exists():
                disk.rename(place, _name_of_old(place)) if any(place.iterdir()) else disk.remove_empty(place)
            disk.rename(fresh, place)
            done.append(True)
        if done:
            disk.sync_folder(place.parent)
            _let_go(claim, disk, keep=keep)
            for path in late:
                with _contested():
                    disk.remove(path)
            return
        fresh.stat()  # or somebody has removed it
    raise RunError(
        f"another run has saved {place} since this save began; that one is whole and stays. Let one run at a time save to a "
        "folder: end the other one, or give this one another folder"
    )


@contextmanager
def _contested() -> Iterator[list[bool]]:
    """Around renames that fail if another writer was there first."""
    try:
        yield []
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY):
            raise


def _name_of_old(place: Path) -> Path:
    try:
        return _free(place.with_name(f"{place.name}.step-{Manifest.read(place).step}"))
    except PenstockError:
        return _free(place.with_name(place.name + _UNREADABLE))


def _free(path: Path) -> Path:
    """That name, or with the first number for which there is nothing."""
    return next(name for name in _numbered(path) if not name.exists())


def _numbered(path: Path) -> Iterator[Path]:
    return (_nth(path, number) for number in count(1))


def _nth(path: Path, number: int) -> Path:
    return path if number == 1 else path.with_name(f"{path.name}-{number}")


def _let_go(claim: Claim, disk: Disk, *, keep: int) -> None:
    """Remove what need not stay beside a checkpoint that was just given its name."""
    place, listed = claim.place, _listed(claim.place)
    for path in older(place)[keep - 1 :]:
        # Another writer may have been here since, and have put aside what must stay.
        same = path in listed and listed[path] != claim.lineage and Lineage.of(path, step=_step(path)) == listed[path]
        if same and (place / FILE).is_file():
            with _contested():
                disk.remove(path)
    unreadable = {int(name[1] or 1): path for path, name in _beside(place, re.escape(_UNREADABLE) + _AGAIN)}
    for number in sorted(unreadable)[:-1]:
        with _contested():
            disk.remove(unreadable[number])


def clear_unfinished(place: Path, disk: Disk, *, of: Lineage | None = None) -> None:
    """Remove what writers that were killed have left: those of a run and of the runs that it went on from, or of all.

    One that has its manifest may be whole, and stays until another one has the name.
    """
    runs = {of.run, *(run for run, _ in of.ancestors)} if of is not None else set()
    for path, run in _saving(place).items():
        if (of is None or run in runs) and not (path / FILE).exists():
            with _contested():
                disk.remove(path)


def _saving(place: Path) -> dict[Path, str | None]:
    """The folders of writers, and whose they are."""
    return {path: name[1] for path, name in _beside(place, rf"{re.escape(SAVING)}(?:-([0-9a-f]{{32}})(?:-\d+)+)?")}


# -- of an earlier run


def put_aside(place: Path, disk: Disk) -> Path | None:
    """Rename what an earlier run left to NAME.before, so that nothing goes on from it by mistake; nothing is removed.

    The newest is the last: whoever is killed meanwhile leaves it where it was.
    """
    clear_unfinished(place, disk)
    found = [*([place] if place.exists() else []), *(path for path in _listed(place) if path != place)]
    if not found:
        return None
    before = place.with_name(place.name + _BEFORE)
    group = next(name for name in _numbered(before) if not name.exists() and not any(_beside(name, _STEP)))
    for path in reversed(found):
        aside = path.with_name(group.name + path.name.removeprefix(place.name))
        disk.rename(path, aside)
    disk.sync_folder(place.parent)
    return aside


def forget(place: Path, disk: Disk) -> None:
    """Remove what earlier runs left but for the newest of the last: when a run has saved its own."""
    if not is_any(place):
        return
    before, groups = place.with_name(place.name + _BEFORE), _beside(place, re.escape(_BEFORE) + _AGAIN + rf"({_STEP})?")
    numbers = sorted({int(name[1] or 1) for _, name in groups})
    for number in numbers:
        for path in list(_listed(_nth(before, number)))[number == numbers[-1] :]:
            disk.remove(path)
