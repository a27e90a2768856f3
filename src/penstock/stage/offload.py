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
from typing import Any, BinaryIO, NamedTuple, Protocol

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


class HostMemory:
    """Memory of the host; on an accelerator pinned, by a stream of its own beside the computing."""

    def __init__(self, *, threshold: int = THRESHOLD) -> None:
        self.threshold = threshold
        self.streams: dict[torch.device, torch.Stream] = {}

    def put(self, flat: Tensor) -> Away:
        if flat.is_cpu:
            return _OnHost(flat.clone(), flat.device, None)
        stream = self.streams.setdefault(flat.device, torch.Stream(flat.device))
        stream.wait_stream(torch.accelerator.current_stream(flat.device))  # what it copies is computed there
        with stream:
            there = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            there.copy_(flat, non_blocking=True)
        flat.record_stream(stream)  # its memory is reused only when the copy is done
        return _OnHost(there, flat.device, stream)


class _OnHost:
    def __init__(self, flat: Tensor, device: torch.device, stream: torch.Stream | None) -> None:
        self.flat, self.device, self.stream = flat, device, stream

    def back(self) -> Tensor:
        if self.stream is None:
            return self.flat
        computing = torch.accelerator.current_stream(self.device)
        here = torch.empty(self.flat.shape, dtype=self.flat.dtype, device=self.device)
        self.stream.wait_stream(computing)
        with self.stream:
            here.copy_(self.flat, non_blocking=True)
        computing.wait_stream(self.stream)
        return here


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

    __slots__ = ("away", "flat", "stays")

    def __init__(self, flat: Tensor) -> None:
        self.flat: Tensor | None = flat
        self.away: Away | None = None
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
        flat = saved.block.flat
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
                block.away, block.flat = elsewhere.put(block.flat), None

    def load(self) -> None:
        """L."""
        for block in self.blocks.values():
            if block.away is not None:
                block.flat, block.away = block.away.back(), None


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
