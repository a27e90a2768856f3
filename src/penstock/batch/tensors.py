"""How many rows each microbatch gets, and what it weighs; one tensor cut so along one dimension, and put together again."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from penstock.batch.specs import TensorChunkSpec
from penstock.checks import check_types
from penstock.errors import MergeError, SplitError
from penstock.nest import Value

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def microbatch_sizes(batch_size: int, num_microbatches: int) -> tuple[int, ...]:
    """The rows of each microbatch: as equal as possible, larger ones first.

        >>> microbatch_sizes(8, 4)
        (2, 2, 2, 2)
        >>> microbatch_sizes(10, 4)
        (3, 3, 2, 2)

    These are the sizes of `torch.tensor_split`, and those of `torch.chunk` whenever the batch divides evenly. No
    microbatch is ever empty: a batch with fewer rows than microbatches is a SplitError.
    """
    try:
        return _microbatch_sizes(batch_size, num_microbatches)
    except Exception:
        check_types(
            "microbatch_sizes", SplitError, batch_size=(batch_size, int), num_microbatches=(num_microbatches, int)
        )
        raise


@lru_cache(maxsize=1024)
def _microbatch_sizes(batch_size: int, num_microbatches: int) -> tuple[int, ...]:
    if num_microbatches < 1:
        raise SplitError(f"num_microbatches is {num_microbatches}; expected 1 or more")
    if batch_size < 1:
        raise SplitError(f"the batch has no rows; expected at least one for each of {num_microbatches} microbatches")
    if batch_size < num_microbatches:
        raise SplitError(
            f"a batch of {batch_size} cannot be cut into {num_microbatches} microbatches: "
            f"use a batch of {num_microbatches} or more, or at most {batch_size} microbatches"
        )
    return even_sizes(batch_size, num_microbatches)


def even_sizes(rows: int, parts: int) -> tuple[int, ...]:
    """Rows in parts as equal as possible, larger ones first; some have none if there are more parts than rows."""
    each, larger = divmod(rows, parts)
    return (each + 1,) * larger + (each,) * (parts - larger)


def weights(sizes: Iterable[int]) -> tuple[Fraction, ...]:
    """The part of the whole batch that each microbatch is; the sum is exactly 1.

    >>> weights([3, 2, 2])
    (Fraction(3, 7), Fraction(2, 7), Fraction(2, 7))
    """
    try:
        counts = tuple(sizes)
        total = sum(counts)
        if total > 0 and min(counts) >= 0:
            return tuple(Fraction(size, total) for size in counts)
    except Exception:
        check_types("weights", SplitError, sizes=(sizes, Sequence[int]))
        raise
    raise SplitError(f"microbatch sizes {counts} have no weights; expected counts of rows with a sum above 0")


def weighted_mean(values: Sequence[Value], sizes: Sequence[int]) -> Value:
    """The mean over the whole batch from the means over its microbatches: tensors or numbers, weighted by size.

        >>> weighted_mean([1.0, 4.0], [3, 1])
        1.75

    With equal sizes this is the plain mean.
    """
    check_types("weighted_mean", SplitError, values=(values, Sequence[Tensor | float]), sizes=(sizes, Sequence[int]))
    if len(values) != len(sizes):
        raise SplitError(f"{len(values)} values and {len(sizes)} microbatch sizes; expected one size for each value")
    return sum(value * float(weight) for value, weight in zip(values, weights(sizes), strict=True))


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether this is a DTensor, without importing them: who has one has imported them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def split_tensor(tensor: Tensor, spec: TensorChunkSpec, num_microbatches: int) -> list[Tensor]:
    """The tensor in pieces along `spec.split_dim`; see `microbatch_sizes` for how large each is.

        >>> [piece.shape for piece in split_tensor(torch.zeros(3, 5), TensorChunkSpec(-1), 2)]
        [torch.Size([3, 3]), torch.Size([3, 2])]

    The pieces share the tensor's memory. A DTensor is cut without communication, each rank its own shard: the pieces
    keep mesh and placements.
    """
    check_types("split_tensor", SplitError, tensor=(tensor, Tensor), spec=(spec, TensorChunkSpec))
    dim = normal_dim(tensor, spec.split_dim)
    return split_sizes(tensor, microbatch_sizes(tensor.size(dim), num_microbatches), dim)


def normal_dim(tensor: Tensor, dim: int) -> int:
    """The dimension counted from the first, checked."""
    if not -tensor.dim() <= dim < tensor.dim():
        raise SplitError(f"a tensor of shape {tuple(tensor.shape)} has no dimension {dim}")
    return dim % tensor.dim()


def split_sizes(tensor: Tensor, sizes: Sequence[int], dim: int) -> list[Tensor]:
    """The tensor in pieces of these sizes along a dimension counted from the first.

    Note "no views": a piece of a batch that needs no gradient shares its memory but is no view for autograd, so that a
    stage which works in place on its input does not give the user's batch a gradient history. Where a gradient is
    needed the pieces are views, and autograd guards them.
    """
    if is_dtensor(tensor):
        return _split_dtensor(tensor, sizes, dim)
    if type(tensor) is Tensor and not tensor.requires_grad:
        return list(tensor.unsafe_split_with_sizes(sizes, dim))
    return list(tensor.split(list(sizes), dim))


def merge_tensors(pieces: Sequence[Tensor], dim: int) -> Tensor:
    """The pieces side by side along a dimension: the inverse of `split_tensor`.

    merge_tensors(split_tensor(x, 4), 0)  # x again
    """
    try:
        if any(map(is_dtensor, pieces)):
            return _merge_dtensors(pieces, dim)
        _check_shapes(pieces, dim)
        return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim)
    except Exception:
        check_types("merge_tensors", MergeError, pieces=(pieces, Sequence[Tensor]), dim=(dim, int))
        raise


def _check_shapes(pieces: Sequence[Tensor], dim: int) -> None:
    dim = normal_dim(pieces[0], dim)
    first = list(pieces[0].shape)
    for microbatch, piece in enumerate(pieces):
        shape = list(piece.shape)
        if len(shape) != len(first) or shape[:dim] + shape[dim + 1 :] != first[:dim] + first[dim + 1 :]:
            raise MergeError(
                f"microbatch 0 has shape {tuple(first)}, microbatch {microbatch} has {tuple(shape)}: "
                f"they may differ in dimension {dim} only"
            )


def _split_dtensor(tensor: DTensor, sizes: Sequence[int], dim: int) -> list[Tensor]:
    """Each rank cuts its own shard; a piece has as many rows as all shards put into it."""
    local = tensor.to_local()
    shards = _shard_sizes(tensor, dim)
    cuts = totals = list(sizes)
    if shards != [tensor.size(dim)]:  # a shard may have nothing for some microbatch
        cuts = list(even_sizes(local.size(dim), len(sizes)))
        totals = [sum(column) for column in zip(*(even_sizes(shard, len(sizes)) for shard in shards), strict=True)]
    pieces = zip(local.split(cuts, dim), totals, strict=True)
    return [
        _placed_like(tensor, piece, (*tensor.shape[:dim], rows, *tensor.shape[dim + 1 :])) for piece, rows in pieces
    ]


def _placed_like(tensor: DTensor, local: Tensor, shape: Sequence[int], stride: Sequence[int] | None = None) -> DTensor:
    """A DTensor of that shape with this shard here, on the mesh and with the placements (and strides) of another one."""
    from torch.distributed.tensor import DTensor

    strides, size = tuple(stride or tensor.stride()), torch.Size(shape)
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=size, stride=strides)


def _shard_sizes(tensor: DTensor, dim: int) -> list[int]:
    """How many rows of this dimension each shard has: DTensor fills shards of ceil(rows / shards) one after another."""
    from torch.distributed.tensor import Shard

    shards = [tensor.size(dim)]
    for mesh_dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard) and placement.dim % tensor.dim() == dim:
            count = tensor.device_mesh.size(mesh_dim)
            full = [(rows, -(-rows // count)) for rows in shards]
            shards = [min(most, max(0, rows - index * most)) for rows, most in full for index in range(count)]
    return shards


def _merge_dtensors(pieces: Sequence[Tensor], dim: int) -> Tensor:
    first = pieces[0]
    parts: list[Tensor] = []
    for microbatch, piece in enumerate(pieces):
        if not is_dtensor(first) or not is_dtensor(piece):
            kinds = [type(piece).__name__ for piece in pieces]
            raise MergeError(f"a mix of DTensors and plain tensors cannot be put together: {kinds}")
        if piece.placements != first.placements or piece.device_mesh != first.device_mesh:
            raise MergeError(
                f"placement mismatch: microbatch 0 has {first.placements} on {first.device_mesh}, "
                f"microbatch {microbatch} has {piece.placements} on {piece.device_mesh}"
            )
        parts.append(piece.to_local())
    assert is_dtensor(first)
    dim = normal_dim(first, dim)
    _check_shapes(pieces, dim)
    shape = (*first.shape[:dim], sum(piece.size(dim) for piece in pieces), *first.shape[dim + 1 :])
    return _placed_like(first, torch.cat(parts, dim), shape, torch.empty(shape, device="meta").stride())
