"""The data parallelism of a stage's module: put around it, found in it, and left aside to see the user's own module.

>>> layer = torch.nn.Linear(2, 2)
>>> adapt(layer).reduces, unwrap(layer) is layer
(False, True)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch  # noqa: F401 - for the example above
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock.checks import check_types
from penstock.errors import ReplicaFailed, StageError
from penstock.parallel.ddp import DDPAdapter, ReplicateAdapter
from penstock.parallel.protocol import DataParallel, Unwrapped

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def adapt(module: nn.Module) -> DataParallel:
    """The adapter for `module`, which may be wrapped itself, have wrapped modules inside, or neither.

    adapt(DistributedDataParallel(module)).reduce_grad()
    """
    check_types("adapt", StageError, module=(module, nn.Module))
    found = list(_adapters(module, set()))
    if len(found) > 1:
        return Several(found)
    return found[0] if found else Unwrapped()


def _to_each(method: Callable[..., None]) -> Callable[..., None]:
    """The method that does for several adapters, one after the other, what this one does for one."""

    def each(self: Several, *args: object) -> None:
        for adapter in self._adapters:
            getattr(adapter, method.__name__)(*args)

    return each


class Several(DataParallel):
    """Wrapped modules side by side in one stage: each action goes to all of them, in one order on every replica."""

    reduces = True

    def __init__(self, adapters: Sequence[DataParallel]) -> None:
        self._adapters = tuple(adapters)

    @property
    def sharded(self) -> bool:
        return any(adapter.sharded for adapter in self._adapters)

    begin, unshard, reshard = map(_to_each, (DataParallel.begin, DataParallel.unshard, DataParallel.reshard))
    give_up = _to_each(DataParallel.give_up)

    def end(self, *, failed: bool = True) -> None:
        with ExitStack() as all_of_them:  # each of them, the last first, even if one raises
            for adapter in self._adapters:
                all_of_them.callback(adapter.end, failed=failed)

    def reduce_grad(self, *, failed: bool = False) -> None:
        problem: ReplicaFailed | None = None
        for adapter in self._adapters:  # all of them, so that no replica waits
            try:
                adapter.reduce_grad(failed=failed)
            except ReplicaFailed as told:
                problem = told
        if problem is not None:
            raise problem

    def explain(self, error: BaseException) -> ReplicaFailed | None:
        return next(filter(None, (adapter.explain(error) for adapter in self._adapters)), None)


def _adapters(module: nn.Module, seen: set[nn.Module]) -> Iterator[DataParallel]:
    """One for each wrapper, from the outside in. What was never imported wraps nothing."""
    if module in seen:
        return
    seen.add(module)
    composable = sys.modules.get("torch.distributed._composable.replicate")
    sharding = sys.modules.get("torch.distributed.fsdp._fully_shard._fully_shard")
    if sharding is not None and isinstance(module, sharding.FSDPModule):
        from penstock.parallel.fsdp import FullyShardAdapter

        yield FullyShardAdapter(module)  # and all that is wrapped inside
        return
    if isinstance(module, DistributedDataParallel):
        yield DDPAdapter(module)
    elif composable is not None and isinstance(module, composable.DDP):
        yield ReplicateAdapter(composable.replicate.state(module))
    for child in module.children():
        yield from _adapters(child, seen)


def wrap(module: nn.Module, kind: str, mesh: DeviceMesh | None) -> nn.Module:
    """The module in DDP ("ddp") or under `fully_shard` ("fsdp"), over a mesh of one dimension.

        wrap(module, "fsdp", mesh["dp"])

    One that has no parameters, or no replicas, stays as it is. Frozen ones are wrapped: they may be tied to those of another
    stage, or be trained later.
    """
    if kind not in ("ddp", "fsdp"):
        raise StageError(f'data_parallel={kind!r}; expected "ddp" or "fsdp"')
    held = [p for p in module.parameters() if p.is_floating_point() or p.is_complex()]
    if mesh is None or mesh.size() == 1 or not held:
        return module
    if kind == "ddp":
        if spread := [name for name, parameter in module.named_parameters() if hasattr(parameter, "placements")]:
            raise StageError(
                f'data_parallel="ddp" where {spread[0]} is spread over another dimension of the mesh: DistributedDataParallel '
                'takes plain tensors alone. Write data_parallel="fsdp"'
            )
        frozen = [] if any(p.requires_grad for p in held) else [min(held, key=Tensor.numel)]
        for parameter in frozen:  # DistributedDataParallel takes no module without anything to train
            parameter.requires_grad_(True)
        try:
            return DistributedDataParallel(module, process_group=mesh.get_group())
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, mesh=mesh)
    return module


def unwrap(module: nn.Module) -> nn.Module:
    """The module whose names and signature the user knows; the other kinds of data parallelism leave it as it is.

    unwrap(DistributedDataParallel(module)) is module
    """
    while isinstance(module, DistributedDataParallel):
        module = module.module
    return module
