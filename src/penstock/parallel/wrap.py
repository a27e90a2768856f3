"""Putting a stage's module into data parallelism, and finding the user's own module inside.

>>> layer = torch.nn.Linear(2, 2)
>>> unwrap(layer) is layer
True
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch  # noqa: F401 - for the example above
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import StageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def wrap(module: nn.Module, kind: str, mesh: DeviceMesh | None) -> nn.Module:
    """The module in DDP ("ddp") or under `fully_shard` ("fsdp"), over a mesh of one dimension.

        wrap(module, "fsdp", mesh["dp"])

    One that has nothing to train, or no replicas, stays as it is.
    """
    if kind not in ("ddp", "fsdp"):
        raise StageError(f'data_parallel={kind!r}; expected "ddp" or "fsdp"')
    if mesh is None or mesh.size() == 1 or not any(p.requires_grad for p in module.parameters()):
        return module
    if kind == "ddp":
        return DistributedDataParallel(module, process_group=mesh.get_group())
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
