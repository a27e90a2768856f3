"""What came out of the microbatches, put together again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from penstock.batch.masks import is_block_mask
from penstock.batch.specs import CustomReducer, Path, TensorChunkSpec, child_specs, is_leaf_spec, open_value
from penstock.batch.tensors import merge_tensors
from penstock.checks import check_types
from penstock.errors import MergeError
from penstock.nest import Node, Value, open_object

_OUTPUT = Path("output", "output_merge_spec")


def merge_chunks(chunks: Sequence[Value], chunk_spec: object = None) -> Value:
    """One value of the same structure from a value of each microbatch: the inverse of splitting, by the same specs.

    >>> import torch
    >>> from penstock.batch import sum_reducer
    >>> merge_chunks([{"y": torch.ones(1), "loss": 2.0}, {"y": torch.zeros(2), "loss": 3.0}], {"loss": sum_reducer})
    {'y': tensor([1., 0., 0.]), 'loss': 5.0}

    - `TensorChunkSpec(dim)`: the tensors side by side along `dim`. This is the default, with dimension 0.
    - `Replicate()`: the value, which must be the same in every microbatch.
    - `CustomReducer(init, fn)`: folded from the first microbatch to the last.
    - By default tensors without a dimension are stacked, one entry for a microbatch, and values that are no tensors
      must be the same in every microbatch.
    """
    try:
        count = len(chunks)
    except TypeError:
        check_types("merge_chunks", MergeError, chunks=(chunks, Sequence))
        raise
    if not count:
        raise MergeError("there are no microbatches to put together")
    if (chunk_spec is None or isinstance(chunk_spec, TensorChunkSpec)) and count > 1:
        dim = 0 if chunk_spec is None else chunk_spec.split_dim
        if all(type(chunk) is Tensor for chunk in chunks) and len({chunk.shape for chunk in chunks}) == 1:
            if -chunks[0].dim() <= dim < chunks[0].dim():
                return torch.cat(list(chunks), dim)
    return _merge(list(chunks), chunk_spec, _OUTPUT)


def _merge(values: list[object], spec: object, path: Path) -> Value:
    node = _open(values[0], spec)
    if node is None:
        return _merge_leaf(values, spec, path)
    children = []
    for microbatch, value in enumerate(values):
        other = _open(value, spec)
        if other is None or list(other.keys) != list(node.keys):
            has = type(value).__name__ if other is None else list(other.keys)
            raise MergeError(f"{path} has {list(node.keys)} in microbatch 0, but {has} in microbatch {microbatch}")
        children.append(other.children)
    columns = zip(zip(*children, strict=True), child_specs(spec, node, path), strict=True)
    return node.build([_merge([*column], own, path.child(node, i)) for i, (column, own) in enumerate(columns)])


def _open(value: object, spec: object) -> Node | None:
    """An object that keeps tensors in its attributes is opened, unless a spec says how to make one of several."""
    whole = is_leaf_spec(spec) and not isinstance(spec, TensorChunkSpec)
    return open_value(value) or (None if whole or is_block_mask(value) else open_object(value))


def _merge_leaf(values: list[object], spec: object, path: Path) -> Value:
    if spec is not None and not is_leaf_spec(spec):
        raise MergeError(
            f"the spec for {path} is {spec!r}, but {path} is a {type(values[0]).__name__}; expected "
            "TensorChunkSpec(dim), Replicate(), a CustomReducer or None"
        )
    if isinstance(spec, CustomReducer):
        return reduce(spec.reduce_fn, values, spec.init_value)
    if isinstance(values[0], Tensor) and (spec is None or isinstance(spec, TensorChunkSpec)):
        return _merge_tensor_leaf(values, spec, path)
    for microbatch, value in enumerate(values):
        if not _same(value, values[0]):
            raise MergeError(
                f"{path} is {_short(values[0])} in microbatch 0, but {_short(value)} in microbatch {microbatch}; "
                f"say how to make one of them: write {path.write('CustomReducer(init, function)')}"
            )
    return values[0]


def _merge_tensor_leaf(values: list[Value], spec: TensorChunkSpec | None, path: Path) -> Tensor:
    for microbatch, value in enumerate(values):
        if not isinstance(value, Tensor):
            raise MergeError(
                f"{path} is a tensor in microbatch 0, but {_short(value)} in microbatch {microbatch}; "
                "every microbatch must give the same kind of value"
            )
    if spec is None and all(value.dim() == 0 for value in values):
        return torch.stack(values)
    if any(value.dim() == 0 for value in values):
        raise MergeError(
            f"{path} has no dimension to put it together along; write {path.write('sum_reducer')}, or another reducer"
        )
    try:
        return merge_tensors(values, 0 if spec is None else spec.split_dim)
    except MergeError as error:
        raise MergeError(f"{path}: {error}") from None


def _same(value: object, other: object) -> bool:
    if value is other:
        return True
    if isinstance(value, Tensor) or isinstance(other, Tensor):
        return isinstance(value, Tensor) and isinstance(other, Tensor) and torch.equal(value, other)
    same = value == other
    return bool(same.all()) if hasattr(same, "all") else bool(same)


def _short(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
