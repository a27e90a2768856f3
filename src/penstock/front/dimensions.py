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

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from penstock.capture import StageModule
from penstock.checks import check_types
from penstock.errors import StageError
from penstock.nest import map_tensors
from penstock.stage.pipeline_stage import PipelineStage

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

Held = TypeVar("Held", bound=Tensor)
MEAN_LOSSES = (
    "binary_cross_entropy",
    "binary_cross_entropy_backward",
    "binary_cross_entropy_with_logits",
    "huber_loss",
    "huber_loss_backward",
    "mse_loss",
    "mse_loss_backward",
    "smooth_l1_loss",
    "smooth_l1_loss_backward",
    "soft_margin_loss",
    "soft_margin_loss_backward",
)
Parallelize = Callable[[nn.Module, "DeviceMesh"], nn.Module | None]


def shard_parameters(module: nn.Module, mesh: DeviceMesh, dims: Mapping[str, int]) -> None:
    """Spread parameters over a dimension of the mesh: `dims` says, by a pattern of their names, along which of their own.

    shard_parameters(module, mesh["tp"], {"*.up.weight": 0, "*.down.weight": 1})

    A pattern that fits no parameter of this stage is none of its business. One that fits one of the names of a parameter with
    several (tied weights) is for all of them. All ranks of the mesh call it.
    """
    from torch.distributed.tensor import Shard

    check_types("shard_parameters", StageError, module=(module, nn.Module), dims=(dims, Mapping[str, int]))
    for names, parameter in _by_names(module.named_parameters(remove_duplicate=False)):
        known = dict.fromkeys([*names, *(other for name in names for other in _other_names(module, name))])
        fitting = {name: [dim for pattern, dim in dims.items() if fnmatchcase(name, pattern)] for name in known}
        found = {name: matches[0] for name, matches in fitting.items() if matches}
        if len({*found.values()}) > 1:
            said = ", ".join(f"{name} along dimension {dim}" for name, dim in found.items())
            raise StageError(
                f"{said}: these are names of one parameter, which is cut along one dimension; give one for all"
            )
        for name, dim in [*found.items()][:1]:
            if not 0 <= dim < parameter.dim():
                raise StageError(
                    f"{name} has the shape {list(parameter.shape)}, and no dimension {dim} to be cut along"
                )
            _put(module, names, _placed(parameter, mesh, Shard(dim)))


def spread(stages: Iterable[PipelineStage], parallelize: Parallelize | None, mesh: DeviceMesh | None) -> None:
    """Let the user's function spread each stage. What it leaves of a captured one is the same on all ranks, and says so."""
    if parallelize is None or mesh is None:
        return
    from torch.distributed.tensor import DTensor, Replicate

    _gather_for_losses()
    names = tuple(name for name in mesh.mesh_dim_names or () if name not in ("dp", "pp"))
    beside = mesh[names] if len(names) > 1 else mesh[names[0]]
    known: dict[
        int, tuple[Tensor, Tensor]
    ] = {}  # what stages of this rank share stays one: each tensor and what it became
    for stage in stages:
        tied = [own for own, _ in _by_names(stage.submod.named_parameters(remove_duplicate=False)) if len(own) > 1]
        stage.submod = parallelize(stage.submod, mesh) or stage.submod
        _check_tied(stage, tied)
        if stage.get_mesh is None and not any(isinstance(one, DTensor) for one in stage.submod.parameters()):
            stage.get_mesh = partial(_mesh_named, mesh, beside)  # no parameter tells on which mesh a DTensor is put
        if isinstance(stage.submod, StageModule):
            held = [
                stage.submod.named_parameters(remove_duplicate=False),
                stage.submod.named_buffers(remove_duplicate=False),
            ]
            for own, value in _by_names(chain(*held)):
                if not isinstance(value, DTensor) and value.numel():
                    if id(value) not in known:
                        known[id(value)] = value, _placed(value, beside, *[Replicate()] * beside.ndim)
                    _put(stage.submod, own, known[id(value)][1])


def _mesh_named(mesh: DeviceMesh, beside: DeviceMesh, names: tuple[str, ...], _: object) -> DeviceMesh:
    """The part of a mesh that has these dimensions; all of it beside "dp" and "pp" if they are of none, or of another mesh."""
    return mesh[names] if names and {*names} <= {*(mesh.mesh_dim_names or ())} else beside


def _check_tied(stage: PipelineStage, tied: Iterable[Sequence[str]]) -> None:
    """Raise if names that stood for one parameter stand for several now, of which each would be trained on its own."""
    now = dict(stage.submod.named_parameters(remove_duplicate=False))
    for names in tied:
        if len({id(now[name]) for name in names if name in now}) > 1:
            first, *others = names
            raise StageError(
                f"{', '.join(names)} of stage {stage.stage_index} were one parameter, and parallelize= has made several of "
                f"it; at the end of that function tie them again: module.{others[0]} = module.{first}"
            )


def whole_loss(
    loss_fn: Callable[..., Tensor] | None, parallelize: Parallelize | None, *, captured: bool
) -> Callable[..., Tensor] | None:
    """The loss as a plain number, whatever the output is spread over.

    That of a captured model, whose placement torch found, is gathered first. That of a stage made by hand is as the user
    placed it, for a loss that works on shards.
    """
    if loss_fn is None or parallelize is None:
        return loss_fn
    from torch.distributed.tensor import DTensor

    def whole(value: Tensor) -> Tensor:
        return value.full_tensor() if isinstance(value, DTensor) else value

    def loss(output: object, *args: object, **kwargs: object) -> Tensor:
        return whole(loss_fn(map_tensors(whole, output) if captured else output, *args, **kwargs))

    return loss


@cache
def _gather_for_losses() -> None:
    """Have torch gather the shards that a loss is taken of, wherever that is: in `loss_fn`, or inside of a model.

    Of shards it takes the mean of each, and divides the gradient by the size of one: at two ranks it is twice what it should
    be. Where shards differ in size, the loss is wrong as well.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.distributed.tensor.experimental import register_sharding

    def gathered(*args: object, **kwargs: object) -> list[tuple[list[object], list[object]]]:
        inputs = [*args, *kwargs.values()]
        return [([Replicate()], [Replicate() if hasattr(one, "placements") else None for one in inputs])]

    register_sharding([getattr(torch.ops.aten, name).default for name in MEAN_LOSSES])(gathered)
    _clear_sharding_prop_cache()  # or what was found for a loss before would stay


def _by_names(named: Iterable[tuple[str, Held]]) -> list[tuple[list[str], Held]]:
    """Each tensor once, with all its names in a module."""
    found: dict[int, tuple[list[str], Held]] = {}
    for name, tensor in named:
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(found.values())


def _other_names(module: nn.Module, name: str) -> Sequence[str]:
    """The names that a parameter of a captured stage has in the user's model."""
    return module.aliases.get(name, ()) if isinstance(module, StageModule) else ()


def _placed(value: Tensor, mesh: DeviceMesh, *placements: Placement) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    made: Tensor = distribute_tensor(value.detach(), mesh, placements)
    return nn.Parameter(made, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else made


def _put(module: nn.Module, names: Iterable[str], value: Tensor) -> None:
    """Put a tensor under all the names that another one has in the module, so that it stays one."""
    for name in names:
        path, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(path), leaf, value)
