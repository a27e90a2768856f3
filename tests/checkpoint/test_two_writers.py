"""Two writers in one place, one of them or both killed: a whole checkpoint is there at any time, and it is the right one.

The story: all writers wrote into one folder, NAME.saving. The second one emptied it while the first one wrote, the first one
published what the second had begun, and the whole checkpoint from before had made room for it: its `save` returned without an
error, and nothing could be loaded. Here the acts of two writers are put between one another in
every way with two changes of hands.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.checkpoint import kept
from penstock.checkpoint.disk import Disk
from penstock.checkpoint.lineage import LINEAGE, Lineage
from penstock.checkpoint.manifest import FILE, Manifest, SmallFile
from penstock.errors import PenstockError, RunError
from tests.checkpoint.crashes import Interrupted, Killed


def write(place: Path, step: int, lineage: Lineage, disk: Disk, *, keep: int = 2) -> Lineage:
    """A checkpoint without tensors, by the acts of a real one."""
    claim = kept.begin(place, disk, lineage)
    try:
        data = claim.lineage.dumps()
        whole = Manifest(step, 1, 1, {}, {}, {LINEAGE: SmallFile.of(data)}, extra={"run": lineage.run})
        with kept.written_to(claim.fresh):
            for name, content in {
                LINEAGE: data,
                FILE: whole.dumps(),
            }.items():  # an act each: nobody looks into a folder meanwhile
                disk.delete(claim.fresh / name)
                (claim.fresh / name).write_bytes(content)
            kept.publish(claim, disk, keep=keep)
    except (PenstockError, OSError):
        disk.remove(claim.fresh)
        raise
    return claim.lineage


def read(place: Path) -> tuple[str, int]:
    found = Manifest.read(kept.candidates(place)[0])
    return str(found.extra["run"]), found.step


def all_whole(place: Path) -> None:
    """What has the name of a checkpoint is one."""
    for path in (place, *kept.older(place)):
        if path.exists():
            Lineage.checked(path, Manifest.read(path))


class Turns:
    """A second writer in a thread that stops before its nth act, until it may go on."""

    def __init__(self, place: Path, at: int, run: Callable[[Disk], object]) -> None:
        self.place = place
        self.stopped, self.goes_on = threading.Event(), threading.Event()
        self.disk, self.error = Interrupted(at, self.pause), None
        self.finished, self.raw = False, None
        self.thread = threading.Thread(target=self.work, args=(run,), daemon=True)

    def pause(self) -> None:
        self.stopped.set()
        assert self.goes_on.wait(30)

    def work(self, run: Callable[[Disk], object]) -> None:
        try:
            run(self.disk)
            self.finished = True
        except PenstockError as error:
            self.error = error
        except Killed:
            pass
        except Exception as error:  # noqa: BLE001  raised by `end`
            self.raw = error
        self.stopped.set()

    def begin(self) -> None:
        self.thread.start()
        assert self.stopped.wait(30)
        all_whole(self.place)
        read(self.place)  # if both are killed here

    def end(self, *, killed: bool) -> None:
        self.disk.dead |= killed
        self.goes_on.set()
        self.thread.join(30)
        assert not self.thread.is_alive()
        if self.raw is not None:
            raise self.raw


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("second", ["goes on from the first", "knows nothing of it"])
def test_two_writers_at_once(tmp_path: Path, second: str, keep: int) -> None:
    """The first does n acts, the second m, the first comes to its end, then the second does or is killed."""
    base, place = tmp_path / "base", tmp_path / "now" / "checkpoint"
    old = write(base / "checkpoint", 1, Lineage.new(), Disk(), keep=keep)
    both, refused, cases = 0, 0, 0
    for at in range(1, 60):
        for other_at in range(1, 60):
            for killed in (False, True):
                shutil.rmtree(place.parent, ignore_errors=True)
                shutil.copytree(base, place.parent)
                new = old.gone_on() if "goes on" in second else Lineage.new()
                other = Turns(place, other_at, lambda disk, new=new: write(place, 7, new, disk, keep=keep))
                disk = Interrupted(at, other.begin)
                told: RunError | None = None
                try:
                    write(place, 2, old, disk, keep=keep)
                except RunError as error:
                    told = error
                all_whole(place)
                newest = read(place)
                if told is None:
                    assert newest in {(old.run, 2), (new.run, 7)}, (
                        "a save that has returned, or one after it, is loaded"
                    )
                if disk.count < at:
                    assert told is None
                    assert killed is False
                    assert both + refused > 20
                    assert refused > 5
                    return
                other.end(killed=killed)
                all_whole(place)
                assert other.finished or told is None or killed, "one of them has saved"
                assert read(place) in {(old.run, 1) if killed else newest, (old.run, 2), (new.run, 7)}
                for error in (told, other.error):
                    assert (
                        error is None or "Let one run at a time save" in str(error) or "went on from" in str(error)
                    ), error
                refused += told is not None or other.error is not None
                both += told is None and other.finished
                after = write(place, 9, Lineage.new(), Interrupted(), keep=keep)
                assert read(place) == (after.run, 9)
                cases += 1
                if other.disk.count < other_at:
                    break
            if other.disk.count < other_at:
                break
    raise AssertionError("a save takes fewer acts than that")
