"""Where what a forward saved goes when it is moved away: the memory of the host, or a file in a folder.

place = offload_target("/scratch")        # or None: the memory of the host
away = place.put(flat)               # the bytes of a storage
flat = away.back()
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from penstock.errors import StageError

THRESHOLD = 1 << 14
"""Bytes below which a storage is not worth a copy."""


class OffloadedBytes(Protocol):
    """The bytes of one storage, somewhere else."""

    def back(self) -> Tensor:
        """The bytes on the device again. Called once."""


class OffloadTarget(Protocol):
    """Where saved tensors go."""

    threshold: int  # bytes below which a storage is left alone

    def put(self, flat: Tensor) -> OffloadedBytes:
        """Take the bytes of a storage, seen as a flat tensor of bytes."""


class PendingLoad(NamedTuple):
    """Bytes on their way back, by a stream beside the computing."""

    flat: Tensor
    there: torch.Event  # they are all there

    def wait(self) -> Tensor:
        """The bytes, for what the current stream computes from here on. The host does not wait."""
        computing = torch.accelerator.current_stream(self.flat.device)
        computing.wait_event(self.there)
        self.flat.record_stream(computing)  # the memory is that of another stream
        return self.flat


@runtime_checkable
class OffloadedBytesAsync(OffloadedBytes, Protocol):
    """One whose bytes come back while the device computes: L only starts them, and their first use waits."""

    def start(self) -> PendingLoad:
        """Begin to bring the bytes back. Called once, and then `back` is not."""


class HostMemory:
    """Memory of the host; on an accelerator pinned, by two streams beside the computing: one there and one back."""

    def __init__(self, *, threshold: int = THRESHOLD) -> None:
        self.threshold = threshold
        self.streams: dict[torch.device, tuple[torch.Stream, torch.Stream]] = {}

    def put(self, flat: Tensor) -> OffloadedBytes:
        if flat.is_cpu:
            return _Copied(flat.clone())
        if flat.device not in self.streams:
            self.streams[flat.device] = torch.Stream(flat.device), torch.Stream(flat.device)
        leaving, coming = self.streams[flat.device]
        leaving.wait_stream(torch.accelerator.current_stream(flat.device))  # what it copies is computed there
        with leaving:
            there = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            there.copy_(flat, non_blocking=True)
        flat.record_stream(leaving)  # its memory is reused only when the copy is done
        return _OnHost(there, flat.device, leaving.record_event(), coming)


class _Copied(NamedTuple):
    """Beside what was computed, on a device that is the host."""

    flat: Tensor

    def back(self) -> Tensor:
        return self.flat


class _OnHost:
    def __init__(self, flat: Tensor, device: torch.device, there: torch.Event, stream: torch.Stream) -> None:
        self.flat, self.device, self.there, self.stream = flat, device, there, stream

    def start(self) -> PendingLoad:
        """The copy waits for the one there and for nothing that is computed, so its memory is that of its own stream."""
        self.stream.wait_event(self.there)
        with self.stream:
            here = torch.empty(self.flat.shape, dtype=self.flat.dtype, device=self.device)
            here.copy_(self.flat, non_blocking=True)
        return PendingLoad(here, self.stream.record_event())

    def back(self) -> Tensor:
        return self.start().wait()


class Folder:
    """A file without a name in a folder: it vanishes with the process that made it, however it ends.

    Each storage has a part of the file. When that has been read back, or is dropped, the next one of its size gets it; when
    nothing is in the file it takes no room on the disk.
    """

    def __init__(self, folder: str | os.PathLike[str], *, threshold: int = THRESHOLD) -> None:
        self.folder = Path(folder)
        self.threshold = threshold
        try:
            there = self.folder.is_dir()
        except OSError as error:  # a name that is too long, for one
            raise StageError(f"offload to {str(self.folder)[:80]!r}: {error.strerror}; name another folder") from error
        if not there:
            raise StageError(f"offload to {str(self.folder)!r}: there is no such folder; make it, or name another")
        self.file: int | None = None  # its descriptor, once there was something to write
        self.parts = 0  # in use
        self.end = 0
        self.free: defaultdict[int, list[int]] = defaultdict(list)  # by size: where parts begin that are not in use
        self.lock = threading.RLock()  # a part may be dropped by the garbage collector at any time, and by any thread

    def put(self, flat: Tensor) -> OffloadedBytes:
        size, values = flat.numel(), flat.cpu().numpy()
        with self.lock:
            self.parts += 1  # before all else: as long as there are parts, none is cut off
            begin = self.free[size].pop() if self.free[size] else self.end
            self.end = max(self.end, begin + size)
        try:
            file = self._open()
            left = values.data
            while left:
                left = left[os.pwrite(file, left, begin + size - len(left)) :]
        except OSError as error:
            self._release(begin, size)
            raise StageError(
                f"offload to {str(self.folder)!r}: {size} bytes could not be written ({error}); free space there, "
                "name another folder, or offload fewer stages"
            ) from error
        return _InFile(self, file, begin, flat)

    def _open(self) -> int:
        with self.lock:
            if self.file is None:
                with tempfile.TemporaryFile(dir=self.folder) as file:
                    self.file = os.dup(file.fileno())
                weakref.finalize(self, os.close, self.file)
            return self.file

    def _release(self, begin: int, size: int) -> None:
        with self.lock:
            self.free[size].append(begin)
            self.parts -= 1
            if self.parts == 0:
                self.free.clear()
                self.end = 0
                if self.file is not None:
                    os.ftruncate(self.file, 0)


class _InFile:
    """A part of the file of a folder."""

    def __init__(self, folder: Folder, file: int, begin: int, flat: Tensor) -> None:
        self.file, self.begin, self.size, self.device = file, begin, flat.numel(), flat.device
        self.release = weakref.finalize(self, folder._release, begin, self.size)
        self.release.atexit = False

    def back(self) -> Tensor:
        flat = torch.empty(self.size, dtype=torch.uint8)
        left = flat.numpy().data
        while left:
            count = os.preadv(self.file, [left], self.begin + self.size - len(left))
            if count == 0:
                raise StageError(
                    f"offload: of {self.size} bytes in a file {len(left)} are gone; somebody has changed it"
                )
            left = left[count:]
        self.release()
        return flat.to(self.device)


def offload_target(given: str | os.PathLike[str] | OffloadTarget | None) -> OffloadTarget:
    """What the option `offload_to` names: a folder, a place of the user's own, or the memory of the host."""
    if isinstance(given, (str, os.PathLike)):
        return Folder(given)
    if isinstance(given, Tensor) or (given is not None and not hasattr(given, "put")):
        raise StageError(f"offload_to is a {type(given).__name__}; expected a folder, or something with put(flat)")
    return HostMemory() if given is None else given
