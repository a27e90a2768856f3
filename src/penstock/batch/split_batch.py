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

from torch import Tensor

from penstock.batch.leaves import BatchLeaf, check_count, cut_leaves, find_batch
from penstock.batch.masks import is_block_mask
from penstock.batch.row_sizes import microbatch_sizes
from penstock.batch.specs import (
    ARGS,
    KWARGS,
    TARGET,
    Microbatches,
    Path,
    TensorChunkSpec,
    child_specs,
    is_call,
    is_leaf_spec,
    is_replicate,
    open_value,
)
from penstock.batch.tensors import split_sizes
from penstock.errors import SplitError
from penstock.misfits import takes
from penstock.nest import Kind, Node, Value

Split: TypeAlias = tuple[list[tuple[Value, ...]], list[dict[str, Value]]]


@takes(SplitError)
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
    if len(args) == 1 and not kwargs and args_spec is None and batch_size is None:
        only = args[0]
        if type(only) is Tensor and only.dim() and only.size(0) >= num_microbatches > 0:
            sizes = microbatch_sizes(only.size(0), num_microbatches)
            pieces = only.split_with_sizes(sizes) if only.requires_grad else only.unsafe_split_with_sizes(sizes)
            return [(piece,) for piece in pieces], [{} for _ in pieces]
    return _split_calls(args, kwargs or {}, num_microbatches, _Rule(args_spec, kwargs_spec, batch_size))


@takes(SplitError)
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
    return _split_calls(args, kwargs or {}, chunks, _Rule(args_chunk_spec, kwargs_chunk_spec, None, strict))


@takes(SplitError)
def split_target(target: Value, num_microbatches: int, *, target_spec: object = None) -> list[Value]:
    """The target of each microbatch; a target is a tensor, None, a number, or any tree of them.

    >>> import torch
    >>> split_target({"labels": torch.arange(4), "weight": 0.5}, 2)[1]
    {'labels': tensor([2, 3]), 'weight': 0.5}

    The default rule holds for the target by itself: its first tensor shows the batch size.
    """
    if type(target) is Tensor and target_spec is None:
        if target.dim() and target.size(0) >= num_microbatches > 0:
            return split_sizes(target, microbatch_sizes(target.size(0), num_microbatches), 0)
    leaves: list[BatchLeaf] = []
    outline = _outline(target, target_spec, TARGET, leaves)
    return list(_fill(outline, cut_leaves(leaves, num_microbatches), num_microbatches))


@takes(SplitError)
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
    leaves: list[BatchLeaf] = []
    _outline(args, args_spec, ARGS, leaves)
    _outline(dict(kwargs or {}), kwargs_spec, KWARGS, leaves)
    found = find_batch(leaves)
    return None if found is None else found.size


@takes(SplitError)
def sizes_of(microbatches: Sequence[Value]) -> tuple[int, ...] | None:
    """The batch size of each ready microbatch, for `weights`; None where one of them shows none.

    >>> import torch
    >>> sizes_of(split_target(torch.zeros(7), 3))
    (3, 2, 2)
    """
    sizes = [item.size(0) if type(item) is Tensor and item.dim() else batch_size_of((item,)) for item in microbatches]
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
    if len(args) == 1 and isinstance(args[0], Microbatches) and any(map(is_call, args[0])):
        if kwargs:
            raise SplitError(
                f"Microbatches of (args, kwargs) came with further keyword arguments {list(kwargs)}; "
                "put them into the kwargs of each microbatch"
            )
        check_count(args[0], num_microbatches, ARGS)
        calls = args[0].calls()
        return [call[0] for call in calls], [call[1] for call in calls]
    leaves: list[BatchLeaf] = []
    args_outline = _outline(tuple(args), rule.args_spec, ARGS, leaves)
    kwargs_outline = _outline(dict(kwargs), rule.kwargs_spec, KWARGS, leaves)
    pieces = cut_leaves(leaves, num_microbatches, rule.batch_size, rule.strict)
    return (list(_fill(args_outline, pieces, num_microbatches)), list(_fill(kwargs_outline, pieces, num_microbatches)))


def _outline(
    value: object, spec: object, path: Path, leaves: list[BatchLeaf], inherited: bool = False
) -> int | _Branch:
    """The shape of a value, with its leaves collected in order."""
    node = open_value(value)
    if node is None:
        if spec is not None and not (isinstance(spec, TensorChunkSpec) or is_replicate(spec)):
            raise SplitError(f"the spec for {path} is {spec!r}; expected TensorChunkSpec(dim), Replicate() or None")
        leaves.append(BatchLeaf(value, spec, path, inherited))
        return len(leaves) - 1
    first = len(leaves)
    inherited = inherited or is_leaf_spec(spec)
    parts = [
        _outline(child, child_spec, path.child(node, index), leaves, inherited)
        for index, (child, child_spec) in enumerate(zip(node.children, child_specs(spec, node, path), strict=True))
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
