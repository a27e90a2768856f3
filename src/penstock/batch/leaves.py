"""What becomes of one leaf: cut, handed on whole, or refused with an error that says what to write.

The rules are those of the notes in split.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from penstock.batch.masks import block_mask_batch, is_block_mask, split_block_mask
from penstock.batch.row_sizes import microbatch_sizes
from penstock.batch.specs import Microbatches, Path, is_replicate
from penstock.batch.tensors import is_dtensor, normal_dim, split_sizes
from penstock.errors import SplitError
from penstock.nest import Value, has_tensor


class BatchLeaf(NamedTuple):
    """A value that is no container, and what the user says about it."""

    value: Value
    spec: Value  # TensorChunkSpec, Replicate or None
    path: Path
    inherited: bool  # the spec stands above the leaf, and holds for the tensors there


class Batch(NamedTuple):
    """The batch size, and the leaf that shows it."""

    size: int
    dim: int
    source: BatchLeaf | None

    def __str__(self) -> str:
        if self.source is None:
            return f"the batch size {self.size}"
        kind = "BlockMask" if is_block_mask(self.source.value) else f"shape {tuple(self.source.value.shape)}"
        return f"the batch size {self.size} (dimension {self.dim} of {self.source.path}, {kind})"


def find_batch(leaves: list[BatchLeaf]) -> Batch | None:
    """The first tensor that is to be cut, or else the first block mask, shows the batch size."""
    mask = None
    for leaf in leaves:
        if is_replicate(leaf.spec):
            continue
        if isinstance(leaf.value, Tensor) and (leaf.spec is not None or leaf.value.dim()):
            dim = _dim_of(leaf)
            return Batch(leaf.value.size(dim), dim, leaf)
        if mask is None and is_block_mask(leaf.value) and block_mask_batch(leaf.value) > 1:
            mask = Batch(block_mask_batch(leaf.value), 0, leaf)
    return mask


def cut_leaves(
    leaves: list[BatchLeaf], num_microbatches: int, batch_size: int | None = None, strict: bool = True
) -> list[Sequence[Value]]:
    """What each leaf is in each microbatch."""
    if num_microbatches < 1:
        raise SplitError(f"num_microbatches is {num_microbatches}; expected 1 or more")
    batch = Batch(batch_size, 0, None) if batch_size is not None else find_batch(leaves)
    if batch is not None and batch.size < num_microbatches and num_microbatches > 1:
        path = batch.source and batch.source.path
        hint = f". If {path} is no batch, write {path.write('Replicate()')}" if path else ""
        advice = f"use at most {batch.size} microbatches, or a larger batch" if batch.size else "the batch has no rows"
        raise SplitError(f"{batch} is smaller than the number of microbatches, {num_microbatches}: {advice}{hint}")
    return [_split_leaf(leaf, num_microbatches, batch, strict) for leaf in leaves]


def _split_leaf(leaf: BatchLeaf, num_microbatches: int, batch: Batch | None, strict: bool) -> Sequence[Value]:
    value = leaf.value
    if isinstance(value, Microbatches):
        check_count(value, num_microbatches, leaf.path)
        return value
    if is_replicate(leaf.spec) or value is None:
        return [value] * num_microbatches
    if isinstance(value, Tensor):
        return _split_tensor_leaf(leaf, num_microbatches, batch, strict)
    if is_block_mask(value):
        return _split_mask_leaf(leaf, num_microbatches, batch if strict else None)
    if leaf.spec is not None and not leaf.inherited:
        raise SplitError(
            f"{leaf.path} is a {type(value).__name__}, which has no dimension to cut; "
            f"instead of {leaf.spec} write {leaf.path.write('None')}"
        )
    if num_microbatches > 1:
        _check_opaque(leaf)
    return [value] * num_microbatches


def _split_tensor_leaf(leaf: BatchLeaf, num_microbatches: int, batch: Batch | None, strict: bool) -> Sequence[Value]:
    tensor: Tensor = leaf.value
    if leaf.spec is None:
        if batch is None or tensor.dim() == 0 or (strict and tensor.size(0) != batch.size):
            if num_microbatches == 1:
                return [tensor]
            raise _ambiguous(leaf, batch)
    dim = _dim_of(leaf)
    size = tensor.size(dim)
    if num_microbatches == 1:
        return split_sizes(tensor, (size,), dim)
    if size < num_microbatches:
        raise SplitError(
            f"{leaf.path} has shape {tuple(tensor.shape)}: dimension {dim} is too small for {num_microbatches} "
            f"microbatches. To hand it to each of them whole, write {leaf.path.write('Replicate()')}"
        )
    per_row = size // batch.size if batch is not None and size % batch.size == 0 else 1
    cut = split_sizes(tensor, [per_row * rows for rows in microbatch_sizes(size // per_row, num_microbatches)], dim)
    if is_dtensor(tensor) and any(piece.size(dim) == 0 for piece in cut):
        raise SplitError(
            f"{leaf.path} is a DTensor of shape {tuple(tensor.shape)}, {tensor.placements}: its shards are too small "
            f"for {num_microbatches} microbatches, some of which would be empty; use fewer, or a larger batch"
        )
    return cut


def _split_mask_leaf(leaf: BatchLeaf, num_microbatches: int, batch: Batch | None) -> Sequence[Value]:
    if leaf.spec is not None and leaf.spec.split_dim != 0:
        raise SplitError(f"{leaf.path} is a BlockMask, which is cut along dimension 0 only; the spec is {leaf.spec}")
    size = block_mask_batch(leaf.value)
    if size == 1:
        return [leaf.value] * num_microbatches
    if batch is not None and size != batch.size and num_microbatches > 1:
        raise SplitError(
            f"{leaf.path} is a BlockMask of batch size {size}, which is neither 1 nor {batch}. "
            f"To hand it to every microbatch whole, write {leaf.path.write('Replicate()')}"
        )
    return split_block_mask(leaf.value, microbatch_sizes(size, num_microbatches))


def _dim_of(leaf: BatchLeaf) -> int:
    try:
        return 0 if leaf.spec is None else normal_dim(leaf.value, leaf.spec.split_dim)
    except SplitError as error:
        raise SplitError(f"{leaf.path}: {error}; the spec is {leaf.spec}") from None


def check_count(ready: Microbatches, num_microbatches: int, path: Path) -> None:
    """Refuse a ready batch of another number of microbatches."""
    if len(ready) != num_microbatches:
        raise SplitError(f"{path} has {len(ready)} ready microbatches; expected {num_microbatches}")


def _ambiguous(leaf: BatchLeaf, batch: Batch | None) -> SplitError:
    shape = tuple(leaf.value.shape)
    if batch is None:
        reason = "no tensor shows a batch size"
    elif not shape:
        reason = f"it has no dimension that could be {batch}"
    else:
        reason = f"its dimension 0 is not {batch}"
    text = f"{leaf.path} has shape {shape}, and {reason}. To hand it to every microbatch whole, write "
    text += leaf.path.write("Replicate()")
    if shape:
        sizes = () if batch is None else (dim for dim, size in enumerate(shape) if size == batch.size)
        likely = next(iter(sizes), 0)
        text += f"; to cut it along dimension {likely}, write {leaf.path.write(f'TensorChunkSpec({likely})')}"
    return SplitError(text)


def _check_opaque(leaf: BatchLeaf) -> None:
    """Refuse what would be handed on whole though there are rows in it: arrays, and objects that hide tensors."""
    value = leaf.value
    if type(value).__module__ == "numpy" and getattr(value, "shape", None):
        raise SplitError(
            f"{leaf.path} is a numpy array of shape {value.shape}; give torch.from_numpy(...) of it, or, to hand it to "
            f"every microbatch whole, write {leaf.path.write('Replicate()')}"
        )
    if isinstance(value, nn.Module) or callable(value):
        return
    hidden = [name for name, item in getattr(value, "__dict__", {}).items() if has_tensor(item, depth=3)]
    if hidden:
        raise SplitError(
            f"{leaf.path} is a {type(value).__name__} with tensors in {hidden}, and nothing says how to cut it: make "
            "it a dataclass, register it with torch.utils._pytree.register_pytree_node, give Microbatches([...]), or, "
            f"to hand it to every microbatch whole, write {leaf.path.write('Replicate()')}"
        )
