"""Offload: tensors that a forward saved for its backward are moved to an offload target (O) and back (L).

    with saving(module, inputs=[x]) as saved:
        output = module(x)
    saved.leave(outputs=[output])
    saved.offload(HostMemory()) # O
    saved.load()                # L
    output.sum().backward()     # as if nothing had happened

Autograd hands every tensor that it saves to a pair of hooks. They keep its storage, once however many tensors share it, and
a recipe for the tensor. What is held anyway stays where it is: parameters and their views, casts of parameters that autocast
keeps for all microbatches, the inputs and the outputs of the stage; and so do small tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.backward.engine_protocol import Args, BackwardEngine, Kwargs, MicrobatchPass, Output, Run, Wrapped
from penstock.backward.offload_targets import (
    THRESHOLD,
    OffloadedBytes,
    OffloadedBytesAsync,
    OffloadTarget,
    PendingLoad,
)
from penstock.errors import StageError
from penstock.nest import Value, tensors_in
from penstock.stage.buffers import memory_of

_PLAIN = (Tensor, nn.Parameter)  # tensors that hold their values themselves


@dataclass(slots=True)
class _Block:
    """One storage, here or away."""

    flat: Tensor | None
    away: OffloadedBytes | None = None
    coming: PendingLoad | None = None  # what to wait for before a use
    stays: bool = False


class _Recipe:
    """A saved tensor: itself as long as it is here, then how to make it of its storage.

    Autograd asks of a saved tensor whether it was changed in place since, but not of one that goes through hooks.
    """

    __slots__ = ("bits", "block", "dtype", "here", "offset", "shape", "spoiled", "stride", "version")

    def __init__(self, tensor: Tensor, block: _Block | None) -> None:
        self.here: Tensor | None = tensor.detach()  # counts changes as the tensor does
        self.version = tensor._version
        self.block = block  # None: it stays
        self.spoiled = False
        self.dtype, self.shape, self.stride = tensor.dtype, tensor.shape, tensor.stride()
        self.offset = int(tensor.storage_offset())
        self.bits = tensor.is_conj(), tensor.is_neg()

    def forget(self) -> None:
        """The tensor is moved away: what counts is what it holds now."""
        self.spoiled = self.here is not None and self.here._version != self.version
        self.here = None

    def tensor(self) -> Tensor:
        if self.spoiled or (self.here is not None and self.here._version != self.version):
            raise StageError(
                f"a tensor of shape {list(self.shape)} that a forward saved for its backward was changed in place since; "
                "expected it to be left alone: change a copy of it"
            )
        if self.here is not None:
            return self.here
        assert self.block is not None, "what stays is here"
        flat, coming = self.block.flat, self.block.coming
        if coming is not None:
            coming.wait()  # at every use: each may be on another stream
        if flat is None:
            raise StageError(
                "a tensor that was moved away is needed for a backward and was not brought back; the plan has no L before it"
            )
        made = torch.empty(0, dtype=self.dtype, device=flat.device)
        made.set_(flat.untyped_storage(), self.offset, self.shape, self.stride)
        conjugated, negated = self.bits
        made = made.conj() if conjugated else made
        return torch._neg_view(made) if negated else made


class Saved:
    """What the forward of one microbatch saved."""

    def __init__(self, staying: frozenset[int], threshold: int, *, casts_stay: bool = False) -> None:
        self.staying = staying  # storages that are left alone
        self.threshold = threshold
        self.casts_stay = casts_stay  # autocast keeps casts of parameters
        self.blocks: dict[int, _Block] = {}
        self.recipes: list[_Recipe] = []  # of what may be moved, as long as it is here

    def pack(self, tensor: Tensor) -> Tensor | _Recipe:
        address = memory_of(tensor)
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or not address:
            return tensor  # what torch.func wraps has no memory of its own
        storage = tensor.untyped_storage()
        if address in self.staying or storage.nbytes() < self.threshold or self._held_anyway(tensor):
            return _Recipe(tensor, None)
        block = self.blocks.get(address)
        if block is None:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            block = self.blocks[address] = _Block(flat)
        self.recipes.append(_Recipe(tensor, block))
        return self.recipes[-1]

    def _held_anyway(self, tensor: Tensor) -> bool:
        """Whether it is a parameter that was not there before the forward (FSDP gathers and frees them on the way), or a cast
        of one that autocast keeps, or a view of either."""
        owner = tensor if tensor._base is None else tensor._base
        if isinstance(owner, nn.Parameter):
            return True
        node = owner.grad_fn if self.casts_stay else None
        return node is not None and node.name() == "ToCopyBackward0" and hasattr(node.next_functions[0][0], "variable")

    @staticmethod
    def unpack(saved: Tensor | _Recipe) -> Tensor:
        return saved.tensor() if isinstance(saved, _Recipe) else saved

    def leave(self, outputs: Iterable[Tensor]) -> None:
        """After the forward: its outputs are held by others until the backward, so their storages stay."""
        for tensor in outputs:
            if (block := self.blocks.get(memory_of(tensor))) is not None:
                block.stays = True

    def offload(self, target: OffloadTarget) -> None:
        """O."""
        for recipe in self.recipes:
            if recipe.block is not None and not recipe.block.stays:
                recipe.forget()
        self.recipes.clear()
        for block in self.blocks.values():
            if block.flat is not None and not block.stays:
                flat = block.flat if block.coming is None else block.coming.wait()
                block.away, block.flat, block.coming = target.put(flat), None, None

    def load(self) -> None:
        """L."""
        for block in self.blocks.values():
            away, block.away = block.away, None
            if isinstance(away, OffloadedBytesAsync):
                block.coming = away.start()
                block.flat = block.coming.flat
            elif away is not None:
                block.flat = away.back()


@contextmanager
def saving(module: nn.Module, inputs: Iterable[Tensor], *, threshold: int = THRESHOLD) -> Iterator[Saved]:
    """While a forward of the module runs inside, what autograd saves is kept in the value of the `with` statement."""
    held = [*module.parameters(), *module.buffers()]
    devices = {tensor.device.type for tensor in held}
    casts_stay = torch.is_autocast_cache_enabled() and any(map(torch.is_autocast_enabled, devices))
    saved = Saved(frozenset(map(memory_of, (*held, *inputs))), threshold, casts_stay=casts_stay)
    try:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
            yield saved
    except RuntimeError as error:
        if not re.search(r"torch\.func.* saved tensor hooks", str(error)):
            raise
        raise StageError(
            "the forward calls torch.func.grad, vjp, jacrev or hessian, which torch does not allow while saved tensors are moved "
            "away. Leave this stage out of offload=; recompute= can have it"
        ) from error


class Offloaded:
    """An engine whose forwards save tensors that can be moved away."""

    def __init__(
        self, inner: BackwardEngine, module: nn.Module, target: OffloadTarget, others: Callable[[], Value]
    ) -> None:
        self.inner = inner
        self.module = module
        self.target = target
        self.others = others  # returns values, beside the arguments, that others hold: targets of the loss

    def begin_step(self, loss: object) -> None:
        self.inner.begin_step(loss)

    def end_step(self) -> None:
        self.inner.end_step()

    def forward(self, run: Run, args: Args, kwargs: Kwargs) -> tuple[MicrobatchPass, Output]:
        inputs = tensors_in((args, kwargs, self.others()))
        with saving(self.module, inputs, threshold=self.target.threshold) as saved:
            inner, output = self.inner.forward(run, args, kwargs)
        saved.leave(tensors_in(output.kept))
        for tensors, _ in output.messages:
            saved.leave(tensors)
        return OffloadedPass(inner, saved, self.target), output


class OffloadedPass(Wrapped):
    """A microbatch whose saved tensors can be moved away."""

    def __init__(self, inner: MicrobatchPass, saved: Saved, target: OffloadTarget) -> None:
        super().__init__(inner)
        self.saved: Saved | None = saved
        self.target = target

    def offload(self) -> None:
        assert self.saved is not None, "an L comes after its O"
        self.saved.offload(self.target)

    def load(self) -> None:
        saved, self.saved = self.saved, None  # from here on the graph alone holds the tensors
        assert saved is not None, "an L comes once"
        saved.load()
