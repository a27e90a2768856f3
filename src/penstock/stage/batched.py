"""The weight pass: gradients out of rows and row gradients, handed to the engine with the parameters as roots.

A small matrix product costs less than calling it. Once two microbatches in a row have made the same calls, calls of the
same sizes form a `Group`: their rows and gradients are stacked, and one `bmm` computes all their weight gradients. That
is done only where it yields the same bits as one product after the other, which is tried once for each size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import compress
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from penstock.stage.calls import Slot, Work
from penstock.stage.engine import run_engine

MOST_PRODUCTS = 1 << 18
"""Above so many multiplications a product costs more than its call."""

MOST_BYTES = 1 << 20
"""Weight gradients of a group, which exist at the same time."""


class Group:
    """Calls of one size: the parameters, and the places of the calls in the order of the forward."""

    def __init__(self, slots: Sequence[Slot], places: list[int], *, with_bias: bool) -> None:
        self.places = places
        self.with_bias = with_bias
        calls = [slots[place].call for place in places]
        self.parameters: tuple[Tensor, ...] = tuple(call.weight for call in calls)
        if with_bias:
            self.parameters += tuple(call.bias for call in calls if call.bias is not None)

    def gradients(self, rows: Tensor, grads: Tensor) -> tuple[Tensor, ...]:
        """In the order of `parameters`, from stacked rows and stacked gradients."""
        found: tuple[Tensor, ...] = torch.bmm(grads.mT, rows).unbind(0)
        return found + grads.sum(1).unbind(0) if self.with_bias else found


class Grouping:
    """How the calls of a forward fall into groups; `singles` are the places of the others."""

    def __init__(self, slots: list[Slot]) -> None:
        self.slots = slots
        groups, self.singles = in_groups([_size(slot) for slot in slots], range(len(slots)))
        self.groups = [Group(slots, places, with_bias=size[-1]) for size, places in groups]

    def harvest(self, rows: list[Tensor], grads: list[Tensor]) -> list[tuple[Group, Tensor, Tensor]]:
        """The work of the groups."""
        with torch.no_grad():
            return [
                (
                    group,
                    torch.stack([rows[place] for place in group.places]),
                    torch.stack([grads[place] for place in group.places]),
                )
                for group in self.groups
            ]


ProductSize = tuple[int, int, int, torch.dtype, torch.device, bool]
"""What products must have in common to form a group: rows, inputs, outputs, dtype, device, whether a bias is trained."""
Item = TypeVar("Item")


def in_groups(
    sizes: Iterable[ProductSize | None], given: Iterable[Item]
) -> tuple[list[tuple[ProductSize, list[Item]]], list[Item]]:
    """Groups of what has one size, and what is better done alone; None is the size of something that is."""
    found: dict[ProductSize | int, list[Item]] = {}
    for number, (size, item) in enumerate(zip(sizes, given, strict=True)):
        found.setdefault(size or number, []).append(item)
    groups: list[tuple[ProductSize, list[Item]]] = []
    alone: list[Item] = []
    for kind, items in found.items():
        if isinstance(kind, int):
            alone += items
            continue
        _, inputs, outputs, dtype, *_ = kind
        most = max(1, MOST_BYTES // (inputs * outputs * dtype.itemsize))
        for start in range(0, len(items), most):
            part = items[start : start + most]
            if len(part) > 1 and _same_bits(kind, len(part), torch.get_num_threads()):
                groups.append((kind, part))
            else:
                alone += part
    return groups, alone


def _size(slot: Slot) -> ProductSize | None:
    """None if the call is better done alone."""
    (outputs, inputs), rows, bias = slot.call.weight.shape, slot.anchor.shape[0], slot.bias
    with_bias = bias is not None and bias.requires_grad
    if slot.transposed or slot.cast is not None or not 0 < rows * inputs * outputs <= MOST_PRODUCTS:
        return None
    if bias is not None and with_bias and bias.dtype is not slot.dtype:
        return None
    return rows, inputs, outputs, slot.dtype, slot.anchor.device, with_bias


@lru_cache(maxsize=4096)
def _same_bits(size: ProductSize, count: int, threads: int) -> bool:
    """Whether the batched product gives the bits of single ones: a matter of the kernels chosen for these sizes."""
    rows, inputs, outputs, dtype, device, _ = size
    numbers = torch.arange(count * rows * max(inputs, outputs), dtype=torch.float64, device=device)
    x = numbers[: count * rows * inputs].sin().to(dtype).view(count, rows, inputs)
    g = numbers[: count * rows * outputs].cos().to(dtype).view(count, rows, outputs)
    products, sums = torch.bmm(g.mT, x), g.sum(1)
    return all(
        torch.equal(products[k], g[k].clone().t().mm(x[k].clone())) and torch.equal(sums[k], g[k].clone().sum(0))
        for k in range(count)
    )


ENGINE_CALL_BYTES = 1 << 20
"""Weight gradients handed to the engine at once: enough to make its cost vanish, few enough to stay in the cache."""


def accumulate(work: list[Work], roots: tuple[Tensor | GradientEdge, ...] = (), grads: tuple[Tensor, ...] = ()) -> None:
    """Compute weight gradients, bit for bit as autograd's backward of the operators does; the engine accumulates them.

    They go to the engine by and by, to be added while they are in the cache; together with `roots`, if there are any.
    """
    all_roots, all_grads = list(roots), list(grads)
    held = 0
    last = None
    for (weight, bias, transposed), rows, grad in work:
        if held >= ENGINE_CALL_BYTES and weight is not last and not roots:
            run_engine(tuple(all_roots), tuple(all_grads))
            all_roots, all_grads, held = [], [], 0
        last = weight
        if weight.requires_grad:
            gradient = rows.t().mm(grad) if transposed else grad.t().mm(rows)
            if gradient.dtype is not weight.dtype:
                gradient = gradient.to(weight.dtype)
            all_roots += (weight,)
            all_grads += (gradient,)
            held += gradient.nbytes
        if bias is not None and bias.requires_grad:
            gradient = grad.sum(0)
            if gradient.dtype is not bias.dtype:
                gradient = gradient.to(bias.dtype)
            all_roots += (bias,)
            all_grads += (gradient,)
    if all_roots:
        run_engine(tuple(all_roots), tuple(all_grads))


def accumulate_batches(batches: list[tuple[Group, Tensor, Tensor]]) -> None:
    """The same for groups of equal layers."""
    for group, rows, grads in batches:
        roots, gradients = group.parameters, group.gradients(rows, grads)
        for root in roots:
            if not root.requires_grad:  # frozen since the forward
                roots, gradients = trained(roots, gradients)
                break
        if roots:
            run_engine(roots, gradients)


def trained(roots: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Those that need a gradient, and the gradients."""
    kept = [root.requires_grad for root in roots]
    return tuple(compress(roots, kept)), tuple(compress(grads, kept))


def grouped(work: list[Work]) -> list[Work]:
    """The calls of one weight side by side, so that one engine call adds them up and its hooks fire once."""
    by_weight: dict[int, list[Work]] = {}
    for item in work:
        by_weight.setdefault(id(item[0].weight), []).append(item)
    return [item for items in by_weight.values() for item in items]
