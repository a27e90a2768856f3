"""A batch into microbatches and back: split and merge are inverses."""

from __future__ import annotations

from penstock.batch.masks import split_block_mask
from penstock.batch.merge_batch import merge_chunks
from penstock.batch.specs import CustomReducer, Microbatches, Replicate, TensorChunkSpec, sum_reducer
from penstock.batch.split_batch import batch_size_of, sizes_of, split_args_kwargs_into_chunks, split_batch, split_target
from penstock.batch.tensors import merge_tensors, microbatch_sizes, split_tensor, weighted_mean, weights

__all__ = [
    "CustomReducer",
    "Microbatches",
    "Replicate",
    "TensorChunkSpec",
    "batch_size_of",
    "merge_chunks",
    "merge_tensors",
    "microbatch_sizes",
    "sizes_of",
    "split_args_kwargs_into_chunks",
    "split_batch",
    "split_block_mask",
    "split_target",
    "split_tensor",
    "sum_reducer",
    "weighted_mean",
    "weights",
]
