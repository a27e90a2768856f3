"""Cut a BlockMask of flex attention along its batch dimension."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, TypeGuard

import torch

from penstock.errors import SplitError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def is_block_mask(value: object) -> TypeGuard[BlockMask]:
    """Whether this is a BlockMask, without importing flex attention: who has one has imported it."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return module is not None and isinstance(value, module.BlockMask)


def block_mask_batch(mask: BlockMask) -> int:
    """The batch size of a block mask; 1 means that it holds for every row of the batch."""
    return 1 if mask.kv_num_blocks.dim() < 3 else mask.kv_num_blocks.size(0)


def split_block_mask(mask: BlockMask, sizes: Sequence[int]) -> list[BlockMask]:
    """One block mask for each size, each of which sees its own rows as rows 0, 1, ...

        first, second = split_block_mask(create_block_mask(causal, 6, None, 512, 512), (4, 2))

    A mask of batch size 1 holds for all rows and is handed on as it is. The tables are views of those of the mask; the
    user's `mask_mod` is called with the row in the whole batch.
    """
    if not hasattr(mask, "kv_num_blocks"):
        raise SplitError(f"split_block_mask(mask={mask!r:.80}); expected a BlockMask of torch's flex attention")
    batch_size = block_mask_batch(mask)
    if batch_size == 1:
        return [mask] * len(sizes)
    if batch_size != sum(sizes):
        raise SplitError(
            f"a BlockMask of batch size {batch_size} cannot be cut into microbatches of sizes {tuple(sizes)}"
        )
    pieces = []
    for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
        piece = copy.copy(mask)
        for name, table in vars(mask).items():
            if isinstance(table, torch.Tensor) and table.size(0) == batch_size:
                setattr(piece, name, table.narrow(0, start, size))
        piece.mask_mod = _with_offset(mask, start)
        pieces.append(piece)
    return pieces


def _with_offset(block_mask: BlockMask, idx: int) -> Callable[..., torch.Tensor]:
    """The user's `mask_mod`, asked for rows from `idx` on.

    It has the same form for every microbatch, the first included, and the free variables `block_mask` and `idx`: programs
    read these to run the graph of one microbatch on another.
    """

    def shifted(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return block_mask.mask_mod(batch + idx, head, query, key)

    return shifted
