"""Every act that changes a file of a checkpoint. Tests put a `Disk` in its place that fails, or is killed, at its nth act."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import BinaryIO

DELETING = ".deleting"  # the end of the name of a folder that is on its way out


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
        """A folder that is not empty is never replaced."""
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

    def remove_empty(self, folder: Path) -> None:
        folder.rmdir()

    def delete(self, file: Path) -> None:
        file.unlink(missing_ok=True)
