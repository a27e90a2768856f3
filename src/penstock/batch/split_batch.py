"""A batch into microbatches.

    >>> import torch
    >>> args, kwargs = split_batch((torch.zeros(8, 3),), {"mask": torch.ones(8)}, 4)
    >>> args[0][0].shape, kwargs[0]["mask"].shape
    (torch.Size([2, 3]), torch.Size([2]))

Note "the default rule". The batch size is that of the first tensor, positional arguments before keyword arguments, that
has a dimension and no Replicate spec: along its TensorChunkSpec, or along dimension 0. A tensor without a spec is cut
along dimension 0 if that has the batch size. Any other tensor (a table, offsets, a scalar, a single row) could mean
anything, so it needs a spec, or a SplitError names it and says what to write. Values that are no tensors go to every
microbatch. With one microbatch there is nothing to decide, and everything is handed on whole.

A tensor with a TensorChunkSpec is cut along it whatever its size; if it has k rows for each row of the batch, so have
its pieces. `microbatch_sizes` says how large the microbatches are when the batch does not divide evenly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from torch import Tensor, nn

from penstock.batch.masks import block_mask_batch, is_block_mask, split_block_mask
from penstock.batch.specs import Microbatches, Path, TensorChunkSpec, child_specs, is_replicate, open_value
from penstock.batch.tensors import is_dtensor, microbatch_sizes, normal_dim, split_sizes
from penstock.checks import check_types
from penstock.errors import SplitError
from penstock.nest import Kind, Node, Value, has_tensor

Split: TypeAlias = tuple[list[tuple[Value, ...]], list[dict[str, Value]]]
_ARGS = Path("args", "args_chunk_spec")
_KWARGS = Path("kwargs", "kwargs_chunk_spec")
_TARGET = Path("target", "target_chunk_spec")


def split_batch(
    args: tuple[object, ...],
    kwargs: Mapping[str, object] | None,
    num_microbatches: int,
    *,
    args_spec: object = None,
    kwargs_spec: object = None,
    batch_size: int | None = None,
) -> Split:
    """The positional and the keyword arguments of each microbatch, by the default rule or by specs.

    >>> import torch
    >>> from penstock.batch import Replicate
    >>> args, _ = split_batch((torch.zeros(8, 3), torch.zeros(20, 3)), {}, 4, args_spec=(None, Replicate()))
    >>> [value.shape[0] for value in args[0]]
    [2, 20]

    Specs stand as their values stand, may leave keys out, and hold for everything below them. `batch_size` overrules
    the size that the tensors show. `Microbatches([...])` as an argument is used as it is.
    """
    try:
        if len(args) == 1 and not kwargs and args_spec is None and batch_size is None:
            only = args[0]
            if type(only) is Tensor and only.dim() and only.size(0) >= num_microbatches > 0:
                sizes = microbatch_sizes(only.size(0), num_microbatches)
                pieces = only.split_with_sizes(sizes) if only.requires_grad else only.unsafe_split_with_sizes(sizes)
                return [(piece,) for piece in pieces], [{} for _ in pieces]
        return _split_calls(args, kwargs or {}, num_microbatches, _Rule(args_spec, kwargs_spec, batch_size))
    except Exception:
        check_types("split_batch", SplitError, args=(args, tuple | list), kwargs=(kwargs, Mapping | None))
        check_types(
            "split_batch", SplitError, num_microbatches=(num_microbatches, int), batch_size=(batch_size, int | None)
        )
        raise


def split_args_kwargs_into_chunks(
    args: tuple[object, ...],
    kwargs: Mapping[str, object] | None,
    chunks: int,
    args_chunk_spec: object = None,
    kwargs_chunk_spec: object = None,
    *,
    strict: bool = True,
) -> Split:
    """`split_batch` under the name and with the parameters that PyTorch users know.

    >>> import torch
    >>> args_split, kwargs_split = split_args_kwargs_into_chunks((torch.zeros(8),), {"mask": torch.ones(8)}, 4)
    >>> len(args_split), len(kwargs_split)
    (4, 4)

    `strict=False` cuts every tensor that has no spec along dimension 0, whatever its size, as
    torch.distributed.pipelining does.
    """
    try:
        return _split_calls(args, kwargs or {}, chunks, _Rule(args_chunk_spec, kwargs_chunk_spec, None, strict))
    except Exception:
        call = "split_args_kwargs_into_chunks"
        check_types(call, SplitError, args=(args, tuple | list), kwargs=(kwargs, Mapping | None), chunks=(chunks, int))
        check_types(call, SplitError, strict=(strict, bool | int))
        raise


def split_target(target: Value, num_microbatches: int, *, target_spec: object = None) -> list[Value]:
    """The target of each microbatch; a target is a tensor, None, a number, or any tree of them.

    >>> import torch
    >>> split_target({"labels": torch.arange(4), "weight": 0.5}, 2)[1]
    {'labels': tensor([2, 3]), 'weight': 0.5}

    The default rule holds for the target by itself: its first tensor shows the batch size.
    """
    try:
        if type(target) is Tensor and target_spec is None:
            if target.dim() and target.size(0) >= num_microbatches > 0:
                return split_sizes(target, microbatch_sizes(target.size(0), num_microbatches), 0)
        leaves: list[_Leaf] = []
        outline = _outline(target, target_spec, _TARGET, leaves)
        return list(_fill(outline, _cut_leaves(leaves, num_microbatches), num_microbatches))
    except Exception:
        check_types("split_target", SplitError, num_microbatches=(num_microbatches, int))
        raise


def batch_size_of(
    args: tuple[object, ...],
    kwargs: Mapping[str, object] | None = None,
    *,
    args_spec: object = None,
    kwargs_spec: object = None,
) -> int | None:
    """The batch size that the default rule finds; None where no tensor shows one.

    >>> import torch
    >>> batch_size_of((torch.zeros(8, 3),))
    8
    """
    leaves: list[_Leaf] = []
    _outline(args, args_spec, _ARGS, leaves)
    try:
        named = dict(kwargs or {})
    except Exception:
        check_types("batch_size_of", SplitError, kwargs=(kwargs, Mapping | None))
        raise
    _outline(named, kwargs_spec, _KWARGS, leaves)
    found = _find_batch(leaves)
    return None if found is None else found.size


def sizes_of(microbatches: Sequence[Value]) -> tuple[int, ...] | None:
    """The batch size of each ready microbatch, for `weights`; None where one of them shows none.

    >>> import torch
    >>> sizes_of(split_target(torch.zeros(7), 3))
    (3, 2, 2)
    """
    try:
        items = iter(microbatches)
    except TypeError:
        check_types("sizes_of", SplitError, microbatches=(microbatches, Sequence))
        raise
    sizes = [item.size(0) if type(item) is Tensor and item.dim() else batch_size_of((item,)) for item in items]
    known = tuple(size for size in sizes if size is not None)
    return known if len(known) == len(sizes) else None


class _Rule(NamedTuple):
    args_spec: object
    kwargs_spec: object
    batch_size: int | None
    strict: bool = True


# To rebuild; others are shared by all microbatches if nothing in them varies.
_CHEAP = (Kind.TUPLE, Kind.LIST, Kind.DICT)


class _Branch(NamedTuple):
    node: Node
    parts: list[int | _Branch]  # an int is the number of a leaf
    rebuild: bool


def _split_calls(args: tuple[object, ...], kwargs: Mapping[str, object], num_microbatches: int, rule: _Rule) -> Split:
    if len(args) == 1 and isinstance(args[0], Microbatches) and (calls := args[0].calls()):
        if kwargs:
            raise SplitError(
                f"Microbatches of (args, kwargs) came with further keyword arguments {list(kwargs)}; "
                "put them into the kwargs of each microbatch"
            )
        _check_count(args[0], num_microbatches, _ARGS)
        return [call[0] for call in calls], [call[1] for call in calls]
    leaves: list[_Leaf] = []
    args_outline = _outline(tuple(args), rule.args_spec, _ARGS, leaves)
    kwargs_outline = _outline(dict(kwargs), rule.kwargs_spec, _KWARGS, leaves)
    pieces = _cut_leaves(leaves, num_microbatches, rule.batch_size, rule.strict)
    return (list(_fill(args_outline, pieces, num_microbatches)), list(_fill(kwargs_outline, pieces, num_microbatches)))


def _outline(value: object, spec: object, path: Path, leaves: list[_Leaf], inherited: bool = False) -> int | _Branch:
    """The shape of a value, with its leaves collected in order."""
    node = open_value(value)
    if node is None:
        if spec is not None and not (isinstance(spec, TensorChunkSpec) or is_replicate(spec)):
            raise SplitError(f"the spec for {path} is {spec!r}; expected TensorChunkSpec(dim), Replicate() or None")
        leaves.append(_Leaf(value, spec, path, inherited))
        return len(leaves) - 1
    first = len(leaves)
    parts = [
        _outline(child, own, path.child(node, index), leaves, inherited=own is spec)
        for index, (child, own) in enumerate(zip(node.children, child_specs(spec, node, path), strict=True))
    ]
    varies = any(isinstance(leaf.value, Tensor | Microbatches) or is_block_mask(leaf.value) for leaf in leaves[first:])
    return _Branch(node, parts, node.kind in _CHEAP or varies)


def _fill(outline: int | _Branch, pieces: list[Sequence[object]], num_microbatches: int) -> Sequence[Value]:
    """The value in each microbatch: every container is built once for each of them."""
    if isinstance(outline, int):
        return pieces[outline]
    if not outline.rebuild:
        return [outline.node.value] * num_microbatches
    parts = [_fill(part, pieces, num_microbatches) for part in outline.parts]
    return [outline.node.build([part[m] for part in parts]) for m in range(num_microbatches)]


# What becomes of one leaf: it is cut, handed on whole, or refused with an error that says what to write.


class _Leaf(NamedTuple):
    """A value that is no container, and what the user says about it."""

    value: Value
    spec: Value  # TensorChunkSpec, Replicate or None
    path: Path
    inherited: bool  # the spec stands above the leaf, and holds for the tensors there


class _Batch(NamedTuple):
    """The batch size, and the leaf that shows it."""

    size: int
    dim: int
    source: _Leaf | None

    def __str__(self) -> str:
        if self.source is None:
            return f"the batch size {self.size}"
        kind = "BlockMask" if is_block_mask(self.source.value) else f"shape {tuple(self.source.value.shape)}"
        return f"the batch size {self.size} (dimension {self.dim} of {self.source.path}, {kind})"


def _find_batch(leaves: list[_Leaf]) -> _Batch | None:
    """The first tensor that is to be cut, or else the first block mask, shows the batch size."""
    mask = None
    for leaf in leaves:
        if is_replicate(leaf.spec):
            continue
        if isinstance(leaf.value, Tensor) and (leaf.spec is not None or leaf.value.dim()):
            dim = _dim_of(leaf)
            return _Batch(leaf.value.size(dim), dim, leaf)
        if mask is None and is_block_mask(leaf.value) and block_mask_batch(leaf.value) > 1:
            mask = _Batch(block_mask_batch(leaf.value), 0, leaf)
    return mask


def _cut_leaves(
    leaves: list[_Leaf], num_microbatches: int, batch_size: int | None = None, strict: bool = True
) -> list[Sequence[Value]]:
    """What each leaf is in each microbatch."""
    if num_microbatches < 1:
        raise SplitError(f"num_microbatches is {num_microbatches}; expected 1 or more")
    batch = _Batch(batch_size, 0, None) if batch_size is not None else _find_batch(leaves)
    if batch is not None and batch.size < num_microbatches and num_microbatches > 1:
        path = batch.source and batch.source.path
        hint = f". If {path} is no batch, write {path.write('Replicate()')}" if path else ""
        advice = f"use at most {batch.size} microbatches, or a larger batch" if batch.size else "the batch has no rows"
        raise SplitError(f"{batch} is smaller than the number of microbatches, {num_microbatches}: {advice}{hint}")
    return [_split_leaf(leaf, num_microbatches, batch, strict) for leaf in leaves]


def _split_leaf(leaf: _Leaf, num_microbatches: int, batch: _Batch | None, strict: bool) -> Sequence[Value]:
    value = leaf.value
    if isinstance(value, Microbatches):
        _check_count(value, num_microbatches, leaf.path)
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


def _split_tensor_leaf(leaf: _Leaf, num_microbatches: int, batch: _Batch | None, strict: bool) -> Sequence[Value]:
    tensor: Tensor = leaf.value
    if leaf.spec is None and (batch is None or tensor.dim() == 0 or (strict and tensor.size(0) != batch.size)):
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


def _split_mask_leaf(leaf: _Leaf, num_microbatches: int, batch: _Batch | None) -> Sequence[Value]:
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


def _dim_of(leaf: _Leaf) -> int:
    try:
        return 0 if leaf.spec is None else normal_dim(leaf.value, leaf.spec.split_dim)
    except SplitError as error:
        raise SplitError(f"{leaf.path}: {error}; the spec is {leaf.spec}") from None


def _check_count(ready: Microbatches, num_microbatches: int, path: Path) -> None:
    """Refuse a ready batch of another number of microbatches."""
    if len(ready) != num_microbatches:
        raise SplitError(f"{path} has {len(ready)} ready microbatches; expected {num_microbatches}")


def _ambiguous(leaf: _Leaf, batch: _Batch | None) -> SplitError:
    shape = tuple(leaf.value.shape)
    reason = f"its dimension 0 is not {batch}" if shape else f"it has no dimension that could be {batch}"
    if batch is None:
        reason = "no tensor shows a batch size"
    text = f"{leaf.path} has shape {shape}, and {reason}. To hand it to every microbatch whole, write "
    text += leaf.path.write("Replicate()")
    if shape:
        sizes = () if batch is None else (dim for dim, size in enumerate(shape) if size == batch.size)
        likely = next(iter(sizes), 0)
        text += f"; to cut it along dimension {likely}, write {leaf.path.write(f'TensorChunkSpec({likely})')}"
    return SplitError(text)


def _check_opaque(leaf: _Leaf) -> None:
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
