"""How many bytes of tensors are alive: every operation that makes one is seen, and so is its end. And when there are too many."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.nest import Value

Operator = Callable[..., object]
Arguments = tuple[object, ...]


class _Active(threading.local):
    meters: tuple[Held, ...] = ()


_active = _Active()


def momentary(size: int) -> None:
    """An operator of penstock's own needs so many bytes for a moment: no meter sees what it makes inside."""
    for meter in _active.meters:
        meter.most = max(meter.most, meter.now + size)


class Held(TorchDispatchMode):
    """Counts the bytes of all tensors that are made inside, as long as they live: now, and the most since it was entered.

    >>> with Held() as held:
    ...     a = torch.ones(100)
    ...     b = a + 1
    ...     del b
    ...     c = a * 2
    >>> held.now, held.most
    (800, 800)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __enter__(self) -> Held:
        self.most = self.now
        _active.meters += (self,)
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    def __exit__(self, *failure: object) -> None:
        _active.meters = tuple(meter for meter in _active.meters if meter is not self)
        super().__exit__(*failure)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Operator, types: object, args: Arguments = (), kwargs: Value = None) -> object:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                for part in _dense(tensor):
                    self._count(part.untyped_storage(), args)
        return result

    def _count(self, storage: torch.UntypedStorage, args: Arguments) -> None:
        key = storage._cdata
        tensors = (part for value in args if isinstance(value, torch.Tensor) for part in _dense(value))
        given = (tensor.untyped_storage()._cdata for tensor in tensors)
        if key in self._seen or key in given:  # known, or a view or an update of what was there before
            return
        size = storage.nbytes()
        self._seen.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._release, key, size).atexit = False

    def _release(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def _dense(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors with memory of their own that a tensor consists of: of a sparse one its indices and values."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    return (tensor,) if tensor.layout is torch.strided else ()


_WORDS = ("can't allocate memory", "not enough memory", "out of memory")  # of allocators that raise RuntimeError


def is_out_of_memory(error: BaseException) -> bool:
    """
    >>> is_out_of_memory(torch.OutOfMemoryError("no")), is_out_of_memory(MemoryError()), is_out_of_memory(ValueError())
    (True, True, False)
    >>> is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."))
    True
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)
