"""Bytes of tensors that are alive, as every operation of a thread sees them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts the memory that operations inside allocate: `peak` is the most at a time, `now()` what is alive."""

    def __init__(self, *given: Any) -> None:
        super().__init__()
        self.known = {
            tensor.untyped_storage()._cdata for tensor in pytree.tree_leaves(given) if isinstance(tensor, Tensor)
        }
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.bound = 0  # of what is alive: what has died is taken off when it matters
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.known and (key not in self.alive or self.alive[key][0].expired()):
                    self.alive[key] = StorageWeakRef(storage), storage.nbytes()
                    self.bound += storage.nbytes()
                del storage
        del tensor
        if self.bound > self.peak:
            self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        self.bound = sum(size for _, size in self.alive.values())
        return self.bound

    def forget(self, *tensors: Tensor | None) -> None:
        """These are meant to stay."""
        for tensor in tensors:
            if tensor is not None:
                self.alive.pop(tensor.untyped_storage()._cdata, None)
                self.known.add(tensor.untyped_storage()._cdata)
