"""`torch.distributed.pipelining.microbatch`."""

from __future__ import annotations

from torch import Tensor

from penstock.batch import CustomReducer, TensorChunkSpec, merge_chunks, split_tensor
from penstock.batch import split_args_kwargs_into_chunks as _split
from penstock.compat._siblings import found_in
from penstock.nest import Value

DEFAULT_CHUNK_DIM = 0
__getattr__ = found_in(__name__, "..batch")
_debug_mask_minibatches = False  # torch's switch for parts that are masked copies of the batch; penstock has none
_LossReducer = CustomReducer
__all__ = ["TensorChunkSpec", "merge_chunks", "split_args_kwargs_into_chunks"]


def split_args_kwargs_into_chunks(
    args: tuple[Value, ...],
    kwargs: dict[str, Value] | None,
    chunks: int,
    args_chunk_spec: Value = None,
    kwargs_chunk_spec: Value = None,
) -> tuple[list[tuple[Value, ...]], list[dict[str, Value]]]:
    """Cut every tensor without a spec along dimension 0, whatever its size. A schedule's step asks where it cannot tell."""
    return _split(args, kwargs, chunks, args_chunk_spec, kwargs_chunk_spec, strict=False)


def _split_tensor(tensor: Tensor, spec: TensorChunkSpec, num_chunks: int) -> list[Tensor]:
    """Cut one tensor along the dimension that its spec names."""
    return split_tensor(tensor, spec, num_chunks)


def _shard_dict_of_args(
    args_dict: dict[str, Value], args_chunk_spec: dict[str, Value], num_chunks: int
) -> list[dict[str, Value]]:
    """Cut a dict of arguments, each by its own spec."""
    return _split((), args_dict, num_chunks, None, args_chunk_spec, strict=False)[1]


def _split_block_mask(block_mask: Value, num_chunks: int) -> list[Value]:
    """Cut the block mask of flex attention along its batch; one that holds for every row goes to every microbatch."""
    parts, _ = _split((block_mask,), {}, num_chunks, strict=False)
    return [mask for (mask,) in parts]
