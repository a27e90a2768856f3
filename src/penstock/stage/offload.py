"""What a forward saved for its backward, moved away from the device and back: O and L.

    moves = Moves(module)
    with moves.saving(inputs=[x]) as saved:
        output = module(x)
    saved.leave(outputs=[output])
    saved.offload(HostMemory()) # O
    saved.load()                # L
    output.sum().backward()     # as if nothing had happened

Autograd hands every tensor that it saves to a pair of hooks. They keep its storage, once however many tensors share it, and
a recipe for the tensor. Parameters and their views stay where they are, and so do small tensors and whatever somebody
else holds anyway: the inputs and the outputs of the stage.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from penstock.errors import StageError

THRESHOLD = 1 << 14
"""Bytes below which a storage is not worth a copy."""


class Away(Protocol):
    """The bytes of one storage, somewhere else."""

    def back(self) -> Tensor:
        """The bytes on the device again. Called once."""
        ...


class Elsewhere(Protocol):
    """Where saved tensors go."""

    threshold: int  # bytes below which a storage is left alone

    def put(self, flat: Tensor) -> Away:
        """Take the bytes of a storage, seen as a flat tensor of bytes."""
        ...


class Coming(NamedTuple):
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
class AwayAsync(Away, Protocol):
    """One whose bytes come back while the device computes: L only starts them, and their first use waits."""

    def start(self) -> Coming:
        """Begin to bring the bytes back. Called once, and then `back` is not."""
        ...


class HostMemory:
    """Memory of the host; on an accelerator pinned, by two streams beside the computing: one there and one back."""

    def __init__(self, *, threshold: int = THRESHOLD) -> None:
        self.threshold = threshold
        self.streams: dict[torch.device, tuple[torch.Stream, torch.Stream]] = {}

    def put(self, flat: Tensor) -> Away:
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


class _Copied:
    """Beside what was computed, on a device that is the host."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat

    def back(self) -> Tensor:
        return self.flat


class _OnHost:
    def __init__(self, flat: Tensor, device: torch.device, there: torch.Event, stream: torch.Stream) -> None:
        self.flat, self.device, self.there, self.stream = flat, device, there, stream

    def start(self) -> Coming:
        """The copy waits for the one there and for nothing that is computed, so its memory is that of its own stream."""
        self.stream.wait_event(self.there)
        with self.stream:
            here = torch.empty(self.flat.shape, dtype=self.flat.dtype, device=self.device)
            here.copy_(self.flat, non_blocking=True)
        return Coming(here, self.stream.record_event())

    def back(self) -> Tensor:
        return self.start().wait()


class Folder:
    """Files without a name in a folder: they vanish with the process that made them, however it ends."""

    def __init__(self, folder: str | os.PathLike[str], *, threshold: int = THRESHOLD) -> None:
        self.folder = Path(folder)
        self.threshold = threshold
        if not self.folder.is_dir():
            raise StageError(f"offload to {str(self.folder)!r}: there is no such folder; make it, or name another")

    def put(self, flat: Tensor) -> Away:
        file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115  it lives until it is read back or dropped
        try:
            file.write(flat.cpu().numpy().data)
            file.flush()
        except OSError as error:
            file.close()
            raise StageError(
                f"offload to {str(self.folder)!r}: {flat.numel()} bytes could not be written ({error}); free space there, "
                "name another folder, or offload fewer stages"
            ) from error
        return _InFile(file, flat.numel(), flat.device)


def elsewhere(given: str | os.PathLike[str] | Elsewhere | None) -> Elsewhere:
    """What the option `offload_to` names: a folder, a place of the user's own, or the memory of the host."""
    if isinstance(given, (str, os.PathLike)):
        return Folder(given)
    return HostMemory() if given is None else given


class _InFile:
    def __init__(self, file: BinaryIO, size: int, device: torch.device) -> None:
        self.file, self.size, self.device = file, size, device

    def back(self) -> Tensor:
        flat = torch.empty(self.size, dtype=torch.uint8)
        with self.file as file:
            file.seek(0)
            count = file.readinto(flat.numpy())  # type: ignore[attr-defined]
        if count != self.size:
            raise StageError(f"offload: a file of {self.size} bytes gave back {count}; somebody has changed it")
        return flat.to(self.device)


class _Block:
    """One storage, here or away."""

    __slots__ = ("away", "coming", "flat", "stays")

    def __init__(self, flat: Tensor) -> None:
        self.flat: Tensor | None = flat
        self.away: Away | None = None
        self.coming: Coming | None = None  # what to wait for before a use
        self.stays = False


class _Recipe(NamedTuple):
    """How to make a saved tensor of its storage."""

    block: _Block
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class Saved:
    """What the forward of one microbatch saved."""

    def __init__(self, staying: frozenset[int], threshold: int) -> None:
        self.staying = staying  # storages that are left alone
        self.threshold = threshold
        self.blocks: dict[int, _Block] = {}

    def pack(self, tensor: Tensor) -> Any:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self.staying or storage.nbytes() < self.threshold:
            return tensor
        block = self.blocks.get(storage.data_ptr())
        if block is None:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            block = self.blocks[storage.data_ptr()] = _Block(flat)
        return _Recipe(block, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    @staticmethod
    def unpack(saved: Any) -> Tensor:
        if not isinstance(saved, _Recipe):
            return saved  # type: ignore[no-any-return]
        flat, coming = saved.block.flat, saved.block.coming
        if coming is not None:
            coming.wait()  # at every use: each may be on another stream
        if flat is None:
            raise StageError(
                "a tensor that was moved away is needed for a backward and was not brought back; the plan has no L before it"
            )
        made = torch.empty(0, dtype=saved.dtype, device=flat.device)
        return made.set_(flat.untyped_storage(), saved.offset, saved.shape, saved.stride)

    def leave(self, outputs: Iterable[Tensor]) -> None:
        """After the forward: its outputs are held by others until the backward, so their storages stay."""
        for tensor in outputs:
            block = self.blocks.get(_address(tensor))
            if block is not None:
                block.stays = True

    @property
    def nbytes(self) -> int:
        """Bytes that are on the device now and could be away."""
        return sum(b.flat.numel() for b in self.blocks.values() if b.flat is not None and not b.stays)

    def offload(self, elsewhere: Elsewhere) -> None:
        """O."""
        for block in self.blocks.values():
            if block.flat is not None and not block.stays:
                flat = block.flat if block.coming is None else block.coming.wait()
                block.away, block.flat, block.coming = elsewhere.put(flat), None, None

    def load(self) -> None:
        """L."""
        for block in self.blocks.values():
            away, block.away = block.away, None
            if isinstance(away, AwayAsync):
                block.coming = away.start()
                block.flat = block.coming.flat
            elif away is not None:
                block.flat = away.back()


class Moves:
    """Makes forwards of one stage save in such a way that it can be moved."""

    def __init__(self, module: nn.Module, *, threshold: int = THRESHOLD) -> None:
        self.module = module
        self.threshold = threshold

    @contextmanager
    def saving(self, inputs: Iterable[Tensor]) -> Iterator[Saved]:
        """Inside, what autograd saves is kept in the value of the `with` statement."""
        held = [*self.module.parameters(), *self.module.buffers(), *inputs]
        saved = Saved(frozenset(_address(tensor) for tensor in held), self.threshold)
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
            yield saved


def _address(tensor: Tensor) -> int:
    """Where a tensor's storage begins; 0 for one that has none of its own (a DTensor's is that of its part)."""
    local = getattr(tensor, "_local_tensor", tensor)
    try:
        return local.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor without storage
        return 0
