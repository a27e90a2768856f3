"""DTensors at the boundary between stages: their local part travels, the rest is described."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from penstock.errors import ShapeError
from penstock.nest import Value

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

MeshGetter: TypeAlias = Callable[[tuple[str, ...], object], "DeviceMesh | None"]
"""Called with the names of a mesh's dimensions, and with what torch knows of its layout, or None."""


def _as_dtensor(tensor: Tensor) -> DTensor | None:
    """The tensor, if it is a DTensor. A program that has not imported those has none, and does not pay for the import."""
    if type(tensor) is Tensor:
        return None
    module = sys.modules.get("torch.distributed.tensor")
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None


@dataclass(frozen=True, slots=True)
class DTensorLayout:
    """How a DTensor is spread, in plain values."""

    shape: tuple[int, ...]  # of the whole
    stride: tuple[int, ...]
    placements: tuple[str, ...]  # "R", "S0", "Psum"
    mesh_names: tuple[str, ...] | None
    mesh_shape: tuple[int, ...]

    def to_json(self) -> list[object]:
        return list(astuple(self))

    @classmethod
    def from_json(cls, data: list[Value]) -> DTensorLayout:
        shape, stride, placements, names, mesh = data
        kinds = {*map(type, (*shape, *stride, *mesh, 0))}, {*map(type, (*placements, *(names or ()), ""))}
        if kinds != ({int}, {str}):
            raise ValueError(f"{data!r:.80} describes no DTensor")
        return cls(tuple(shape), tuple(stride), tuple(placements), None if names is None else tuple(names), tuple(mesh))


def layout_of(tensor: Tensor) -> DTensorLayout | None:
    """How a DTensor is spread; None for any other tensor."""
    spread = _as_dtensor(tensor)
    if spread is None:
        return None
    mesh = spread.device_mesh
    return DTensorLayout(
        tuple(spread.shape),
        tuple(spread.stride()),
        tuple(map(_spell, spread.placements)),
        None if mesh.mesh_dim_names is None else tuple(mesh.mesh_dim_names),
        tuple(mesh.mesh.shape),
    )


def to_local(tensor: Tensor) -> Tensor:
    """The part of a DTensor that this rank holds, without its graph; any other tensor as it is, once it is there."""
    spread = _as_dtensor(tensor)
    return _arrived(tensor if spread is None else spread.detach().to_local())  # type: ignore[attr-defined]  # still a DTensor


def _arrived(tensor: Tensor) -> Tensor:
    """The result of a collective, if that may still be under way: its memory is not there before; any other tensor as it is.

    What torch's `RowwiseParallel` gives is one, and so is the gradient of what its `ColwiseParallel` takes.
    """
    wait = None if type(tensor) is Tensor else getattr(tensor, "wait", None)
    return tensor if wait is None else wait()


def whole_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be spread over replicas, without its graph; they all call it."""
    spread = _as_dtensor(tensor)
    return _arrived(tensor.detach() if spread is None else spread.full_tensor().detach())


def from_local(local: Tensor, layout: DTensorLayout, mesh: DeviceMesh | None) -> Tensor:
    """The DTensor of which this is the local part, on the mesh of the receiving stage."""
    if mesh is None:
        raise ShapeError(
            f"a DTensor of shape {list(layout.shape)} arrived, but this stage has no mesh to put it on: its module holds no "
            "DTensor parameter. Give one: PipelineStage(..., get_mesh=lambda names, layout: mesh)"
        )
    if tuple(mesh.mesh.shape) != layout.mesh_shape:
        raise ShapeError(
            f"a DTensor on a mesh of {layout.mesh_shape} arrived at a stage on a mesh of {tuple(mesh.mesh.shape)}"
        )
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        mesh,
        tuple(map(_placement, layout.placements)),
        run_check=False,
        shape=torch.Size(layout.shape),
        stride=layout.stride,
    )


def mesh_of(module: torch.nn.Module, get_mesh: MeshGetter | None, layout: DTensorLayout | None) -> DeviceMesh | None:
    """The mesh that a stage puts arriving DTensors on: asked of the user, or read off its parameters."""
    if get_mesh is not None and layout is not None:
        return get_mesh(layout.mesh_names or (), None)
    found = next((found.device_mesh for found in map(_as_dtensor, module.parameters()) if found is not None), None)
    wanted = () if layout is None else layout.mesh_names or ()
    # Between forwards `fully_shard` has the parameters on a mesh with the data-parallel dimension in front.
    inside = found is not None and wanted and set(wanted) < set(found.mesh_dim_names or ())
    return found[wanted] if inside and found is not None else found


def placed_as(tensor: Tensor, like: Tensor) -> Tensor:
    """A DTensor spread as another one is, without its graph; all ranks of the mesh call it. Any other tensor as it is.

    The gradient of a DTensor may be spread in another way than the parameter: each rank may hold a term of a sum.
    """
    spread, wanted = _as_dtensor(tensor), _as_dtensor(like)
    if spread is None or wanted is None or spread.placements == wanted.placements:
        return tensor
    placed: Tensor = spread.detach().redistribute(wanted.device_mesh, wanted.placements)  # type: ignore[attr-defined]  # a DTensor
    return placed


def summed(grad: Value) -> Value:
    """A DTensor without terms of sums, which the ranks of its mesh add up; all of them call it."""
    from torch.distributed.tensor import Replicate

    wanted = [Replicate() if placement.is_partial() else placement for placement in grad.placements]
    return grad if wanted == [*grad.placements] else grad.detach().redistribute(grad.device_mesh, wanted)


def _spell(placement: Placement) -> str:
    from torch.distributed.tensor import Partial, Shard

    if isinstance(placement, Shard):
        return f"S{placement.dim}"
    return f"P{placement.reduce_op}" if isinstance(placement, Partial) else "R"


def _placement(text: str) -> Placement:
    from torch.distributed.tensor import Partial, Replicate, Shard

    if text[0] == "S":
        return Shard(int(text[1:]))
    return Replicate() if text == "R" else Partial(text[1:])
