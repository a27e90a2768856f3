"""Block masks of flex attention: each microbatch sees its own rows of the mask."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from penstock.batch import Replicate, TensorChunkSpec, merge_chunks, split_batch, split_block_mask
from penstock.errors import SplitError

LENGTHS = torch.tensor([64, 32, 48, 16, 64])


def within(batch, head, query, key):
    """Causal, and within the length of the row: another mask for each row of the batch."""
    return (query >= key) & (key < LENGTHS[batch])


def block_mask(batch_size, mask_mod=within):
    return create_block_mask(mask_mod, batch_size, None, 64, 64, device="cpu", BLOCK_SIZE=16)


@pytest.mark.parametrize("num_microbatches", [2, 5])
def test_each_piece_is_the_mask_of_its_rows(num_microbatches):
    mask = block_mask(5)
    x = torch.zeros(5, 1)
    args, kwargs = split_batch((x,), {"mask": mask}, num_microbatches)
    start = 0
    for (rows,), piece in zip(args, [one["mask"] for one in kwargs], strict=True):
        size = len(rows)
        assert isinstance(piece, BlockMask)
        assert piece.shape == (size, 1, 64, 64)
        assert torch.equal(piece.to_dense(), mask.to_dense()[start : start + size])
        assert torch.equal(piece.q_num_blocks, mask.q_num_blocks[start : start + size])
        dense = create_mask(piece.mask_mod, size, None, 64, 64, device="cpu")
        assert torch.equal(dense, create_mask(within, 5, None, 64, 64, device="cpu")[start : start + size])
        start += size
    assert mask.shape == (5, 1, 64, 64), "the user's mask stays as it is"
    assert mask.mask_mod is within


def test_the_tables_are_those_of_a_mask_made_for_the_rows():
    pieces = split_block_mask(block_mask(5), (3, 2))
    alone = block_mask(3)
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices"):
        assert torch.equal(getattr(pieces[0], name), getattr(alone, name)), name


def test_a_mask_for_every_row_is_handed_on():
    mask = block_mask(1, lambda batch, head, query, key: query >= key)
    _, kwargs = split_batch((torch.zeros(4),), {"mask": mask}, 2)
    assert kwargs[0]["mask"] is kwargs[1]["mask"] is mask
    assert merge_chunks(kwargs)["mask"] is mask


def test_specs_for_masks():
    mask = block_mask(4)
    x = torch.zeros(4)
    _, kwargs = split_batch((x,), {"mask": mask}, 2, kwargs_spec={"mask": TensorChunkSpec(0)})
    assert kwargs[1]["mask"].shape[0] == 2
    _, kwargs = split_batch((x,), {"mask": mask}, 2, kwargs_spec={"mask": Replicate()})
    assert kwargs[1]["mask"] is mask
    with pytest.raises(SplitError, match="dimension 0 only"):
        split_batch((x,), {"mask": mask}, 2, kwargs_spec={"mask": TensorChunkSpec(1)})


def test_a_mask_of_another_batch():
    with pytest.raises(SplitError, match=r"kwargs\['mask'\] is a BlockMask of batch size 3, .*the batch size 4"):
        split_batch((torch.zeros(4),), {"mask": block_mask(3)}, 2)
    with pytest.raises(SplitError, match=r"cannot be cut into"):
        split_block_mask(block_mask(3), (2, 2))


def test_a_mask_alone_shows_the_batch_size():
    args, _ = split_batch((block_mask(5), 1), {}, 2)
    assert [piece.shape[0] for piece, _ in args] == [3, 2]
    with pytest.raises(SplitError, match=r"the batch size 2 \(dimension 0 of args\[0\], BlockMask\) is smaller"):
        split_batch((block_mask(2),), {}, 3)
