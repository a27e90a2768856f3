"""A disk that does something else before its nth act: is killed there, or lets another writer come in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from penstock.checkpoint.disk import Disk


class Killed(BaseException):
    """The process is gone: nothing catches it, and nothing is done on the disk any more."""


class Interrupted(Disk):
    """Every act is counted, also each file that is deleted; before the nth, `then` is called once."""

    def __init__(self, at: int = 1 << 60, then: Callable[[], None] = lambda: None) -> None:
        self.at, self.then = at, then
        self.count, self.dead = 0, False

    def kill(self) -> None:
        self.dead = True
        raise Killed

    def act(self) -> None:
        if self.dead:
            raise Killed
        self.count += 1
        if self.count == self.at:
            self.then()

    def make_folder(self, folder: Path) -> None:
        self.act()
        super().make_folder(folder)

    def create(self, file: Path) -> BinaryIO:
        self.act()
        return super().create(file)

    def write(self, stream: BinaryIO, data: bytes | memoryview) -> None:
        try:
            self.act()
        except Killed:
            stream.write(data[: len(data) // 2])
            stream.flush()
            raise
        super().write(stream, data)

    def finish(self, stream: BinaryIO) -> None:
        self.act()
        stream.close()  # a process that is killed loses nothing that it gave to the system

    def rename(self, old: Path, new: Path) -> None:
        self.act()
        super().rename(old, new)

    def sync_folder(self, folder: Path) -> None:
        self.act()

    def remove_empty(self, folder: Path) -> None:
        self.act()
        super().remove_empty(folder)

    def delete(self, file: Path) -> None:
        self.act()
        super().delete(file)

    def clear(self, folder: Path) -> None:
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            self.act()
            path.unlink(missing_ok=True)
        super().clear(folder)


def killed() -> Callable[[int], Interrupted]:
    """Make disks that are killed before their nth act."""

    def made(at: int) -> Interrupted:
        disk = Interrupted(at)
        disk.then = disk.kill
        return disk

    return made


def points(run: Callable[[int], bool], *, most: int = 400) -> Iterator[int]:
    """The numbers of acts at which `run` was interrupted: from the first until it comes to its end without that."""
    for at in range(1, most):
        if not run(at):
            return
        yield at
    raise AssertionError(f"more than {most} acts")
