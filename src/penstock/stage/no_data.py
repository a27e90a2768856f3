"""How a module runs without data and leaves nothing behind that has none.

    rewind = remember_attributes(module)
    with without_data(module) as mode:
        module(mode.from_tensor(x))     # fake tensors: shapes, types and nothing else
    rewind()                            # what the modules keep is what they kept

Code keeps what it has computed once: a mask in an attribute, in a dictionary, behind `functools.cache`. A fake tensor in such a
place would make all later results fake. So attributes are put back, and what follows neither from an input nor from what the
module holds is computed as ever and is no fake: that is what caches outside of modules have.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

_TABLES = (dict, OrderedDict, defaultdict, list, set)  # and nothing that derives from them: it may refuse to be filled
_READ = torch.ops.aten._local_scalar_dense.default  # the value of a tensor, for Python


@contextmanager
def without_data(module: nn.Module) -> Iterator[FakeTensorMode]:
    """While this is open nothing is computed from fake tensors and from those that `module` holds, which stay as they are."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    kept = (value for part in module.modules() for value in tree_leaves(list(part.__dict__.values())))
    held = {_memory(value) for value in kept if isinstance(value, Tensor)} - {0}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, _RealWithoutInputs(mode, held):
        yield mode


class _RealWithoutInputs(TorchDispatchMode):
    """Operators that are given neither a fake tensor nor one that is `held` run as ever."""

    supports_higher_order_operators = True

    def __init__(self, mode: FakeTensorMode, held: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode, self.held = mode, held

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not isinstance(func, torch._ops.OpOverload) or any(isinstance(tensor, FakeTensor) for tensor in given):
            return func(*args, **kwargs)
        if any(_memory(tensor) in self.held for tensor in given) and func is not _READ:
            args, kwargs = tree_map_only(Tensor, self.mode.from_tensor, (args, kwargs))
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _memory(tensor: Tensor) -> int:
    """Where it lies; 0: nowhere, or nobody knows."""
    plain = tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)
    return tensor.untyped_storage().data_ptr() if plain else 0


def remember_attributes(module: nn.Module) -> Callable[[], None]:
    """What the modules inside keep, as a function that brings it back; of tensors, which they are and not what they hold.

    >>> counter = nn.Identity()
    >>> counter.calls, counter.seen = 0, []
    >>> rewind = remember_attributes(counter)
    >>> counter.calls, counter.mask = 1, torch.ones(2)
    >>> counter.seen.append(3)
    >>> rewind()
    >>> counter.calls, counter.seen, hasattr(counter, "mask")
    (0, [], False)
    """
    tables: list[tuple[Any, Any]] = []
    for part in module.modules():
        tables.append((part.__dict__, dict(part.__dict__)))
        tables += [(value, value.copy()) for value in part.__dict__.values() if type(value) in _TABLES]

    def rewind() -> None:
        for table, before in tables:
            if not _same(table, before):
                table.clear()
                (table.extend if isinstance(table, list) else table.update)(before)

    return rewind


def _same(table: Any, before: Any) -> bool:
    """Whether the same objects are in it, in the same order."""
    if isinstance(table, dict):
        return _same(list(table), list(before)) and _same(list(table.values()), list(before.values()))
    return len(table) == len(before) and all(one is other for one, other in zip(table, before, strict=True))
