"""Find the data parallelism of a stage's module.

>>> adapt(torch.nn.Linear(2, 2)).reduces
False
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import torch  # noqa: F401 - for the example above
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import ReplicaFailed, StageError
from penstock.misfits import takes
from penstock.parallel.ddp import DDPAdapter, ReplicateAdapter
from penstock.parallel.protocol import DataParallel, Unwrapped


@takes(StageError)
def adapt(module: nn.Module) -> DataParallel:
    """The adapter for `module`, which may be wrapped itself, have wrapped modules inside, or neither.

    adapt(DistributedDataParallel(module)).reduce_grad()
    """
    found = list(_adapters(module, set()))
    if len(found) > 1:
        return Several(found)
    return found[0] if found else Unwrapped()


class Several(DataParallel):
    """Wrapped modules side by side in one stage: each action goes to all of them, in one order on every replica."""

    reduces = True

    def __init__(self, adapters: Sequence[DataParallel]) -> None:
        self._adapters = tuple(adapters)

    @property
    def sharded(self) -> bool:
        return any(adapter.sharded for adapter in self._adapters)

    def begin(self) -> None:
        for adapter in self._adapters:
            adapter.begin()

    def end(self, *, failed: bool = True) -> None:
        with ExitStack() as all_of_them:  # each of them, the last first, even if one raises
            for adapter in self._adapters:
                all_of_them.callback(adapter.end, failed=failed)

    def unshard(self) -> None:
        for adapter in self._adapters:
            adapter.unshard()

    def reshard(self) -> None:
        for adapter in self._adapters:
            adapter.reshard()

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

    def give_up(self, cause: str) -> None:
        for adapter in self._adapters:
            adapter.give_up(cause)


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
