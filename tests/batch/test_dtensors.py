"""DTensors are cut shard by shard, without communication, and keep mesh and placements.

One process plays every rank of a mesh in turn: cutting and merging never communicate, so a fake group is enough.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from penstock.batch import TensorChunkSpec, merge_chunks, split_batch, split_target, split_tensor
from penstock.errors import MergeError, SplitError


def each_rank(num_ranks: int) -> Iterator[DeviceMesh]:
    for rank in range(num_ranks):
        dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
        try:
            yield DeviceMesh("cpu", torch.arange(num_ranks))
        finally:
            dist.destroy_process_group()


def sharded(mesh: DeviceMesh, whole: torch.Tensor, placement: Shard | Replicate) -> DTensor:
    """The whole value as a DTensor, made without communication."""
    local = whole
    if isinstance(placement, Shard):
        most = -(-whole.size(placement.dim) // mesh.size())
        parts = [*whole.split(most, placement.dim)]
        local = (
            parts[mesh.get_local_rank()] if mesh.get_local_rank() < len(parts) else whole.narrow(placement.dim, 0, 0)
        )
    return DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
    )


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize(("rows", "num_microbatches", "num_ranks"), [(8, 2, 2), (7, 3, 2), (10, 2, 4), (7, 3, 4)])
def test_pieces_fit_together_on_every_rank(placement, rows, num_microbatches, num_ranks):
    whole = torch.arange(rows * 5.0).view(rows, 5)
    shapes, local_rows = [], []
    for mesh in each_rank(num_ranks):
        tensor = sharded(mesh, whole, placement)
        pieces = split_tensor(tensor, TensorChunkSpec(0), num_microbatches)
        assert all(isinstance(piece, DTensor) for piece in pieces)
        assert all(piece.placements == (placement,) and piece.device_mesh is mesh for piece in pieces)
        shapes.append([tuple(piece.shape) for piece in pieces])
        local_rows.append([piece.to_local().size(0) for piece in pieces])
        merged = merge_chunks([(piece,) for piece in pieces], (TensorChunkSpec(-2),))[0]
        assert (merged.shape, merged.placements, merged.device_mesh) == (tensor.shape, (placement,), mesh)
        assert torch.equal(merged.to_local(), tensor.to_local())
        assert merged.stride() == tensor.stride()
    assert all(shape == shapes[0] for shape in shapes), "every rank sees the same pieces"
    assert sum(shape[0] for shape in shapes[0]) == rows
    if placement == Shard(0):
        totals = [sum(column) for column in zip(*local_rows, strict=True)]
        assert totals == [shape[0] for shape in shapes[0]], "a piece has the rows that its shards have"


def test_a_dtensor_batch_and_target():
    for mesh in each_rank(2):
        x = sharded(mesh, torch.randn(8, 4), Shard(0))
        args, _ = split_batch((x,), {}, 2)
        assert [piece.shape[0] for (piece,) in args] == [4, 4]
        assert [piece.shape[0] for piece in split_target(x, 4)] == [2, 2, 2, 2]


def test_a_microbatch_without_rows_is_refused():
    for mesh in each_rank(4):
        x = sharded(mesh, torch.randn(7, 4), Shard(0))
        with pytest.raises(SplitError, match=r"target is a DTensor of shape \(7, 4\).*would be empty"):
            split_target(x, 3)


def test_what_does_not_fit_together():
    for mesh in each_rank(2):
        whole = torch.randn(4, 4)
        shard, copy = sharded(mesh, whole, Shard(0)), sharded(mesh, whole, Replicate())
        with pytest.raises(AssertionError, match=r"output\[0\]: placement mismatch") as caught:
            merge_chunks([(shard,), (copy,)], (TensorChunkSpec(0),))
        assert isinstance(caught.value, MergeError)
        for chunks in ([(shard,), (whole,)], [(whole,), (shard,)]):
            with pytest.raises(AssertionError, match="a mix of"):
                merge_chunks(chunks, (TensorChunkSpec(0),))
