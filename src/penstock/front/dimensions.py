"""Tensor, context and expert parallelism: the dimensions of a mesh beside "dp" and "pp".

    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("pp", "tp"))

    def parallelize(module, mesh):
        shard_parameters(module, mesh["tp"], {"*.up.weight": 0, "*.down.weight": 1})

    pipe = Pipeline(model, (x,), mesh=mesh, parallelize=parallelize)

The function is called once for each stage of a rank. Of a captured stage it makes parameters DTensors, and torch works out what
follows from that, operator by operator. A stage made by hand has real modules, for `parallelize_module`. What leaves a stage as a
DTensor travels as shards, each to the rank in the same place of the next stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import Tensor, nn

from penstock.capture import StageModule
from penstock.errors import StageError
from penstock.misfits import takes
from penstock.stage.pipeline_stage import PipelineStage

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

Parallelize = Callable[[nn.Module, "DeviceMesh"], nn.Module | None]


@takes(StageError)
def shard_parameters(module: nn.Module, mesh: DeviceMesh, dims: Mapping[str, int]) -> None:
    """Spread parameters over a dimension of the mesh: `dims` says, by a pattern of their names, along which of their own.

    shard_parameters(module, mesh["tp"], {"*.up.weight": 0, "*.down.weight": 1})

    A pattern that fits no parameter of this stage is none of its business. All ranks of the mesh call it.
    """
    from torch.distributed.tensor import Shard

    for name, parameter in list(module.named_parameters()):
        found = next((dim for pattern, dim in dims.items() if fnmatchcase(name, pattern)), None)
        if found is not None:
            if not 0 <= found < parameter.dim():
                raise StageError(
                    f"{name} has the shape {list(parameter.shape)}, and no dimension {found} to be cut along"
                )
            _place(module, name, parameter, mesh, Shard(found))


def spread(stages: Iterable[PipelineStage], parallelize: Parallelize | None, mesh: DeviceMesh | None) -> None:
    """Let the user's function spread each stage. What it leaves of a captured one is the same on all ranks, and says so."""
    if parallelize is None or mesh is None:
        return
    from torch.distributed.tensor import DTensor, Replicate

    names = tuple(name for name in mesh.mesh_dim_names or () if name not in ("dp", "pp"))
    beside = mesh[names] if len(names) > 1 else mesh[names[0]]
    for stage in stages:
        stage.submod = parallelize(stage.submod, mesh) or stage.submod
        if isinstance(stage.submod, StageModule):
            for name, value in [*stage.submod.named_parameters(), *stage.submod.named_buffers()]:
                if not isinstance(value, DTensor) and value.numel():
                    _place(stage.submod, name, value, beside, *[Replicate()] * beside.ndim)


def whole_loss(loss_fn: Callable[..., Tensor] | None, parallelize: Parallelize | None) -> Callable[..., Tensor] | None:
    """The loss as a plain number, whatever the output is spread over."""
    if loss_fn is None or parallelize is None:
        return loss_fn
    from torch.distributed.tensor import DTensor

    def loss(*args: object, **kwargs: object) -> Tensor:
        found = loss_fn(*args, **kwargs)
        return found.full_tensor() if isinstance(found, DTensor) else found

    return loss


def _place(module: nn.Module, name: str, value: Tensor, mesh: DeviceMesh, *placements: Placement) -> None:
    from torch.distributed.tensor import distribute_tensor

    path, _, leaf = name.rpartition(".")
    made: Tensor = distribute_tensor(value.detach(), mesh, placements)
    if isinstance(value, nn.Parameter):
        made = nn.Parameter(made, requires_grad=value.requires_grad)
    setattr(module.get_submodule(path), leaf, made)
