"""Weight work of many small layers of one size, done by one batched product.

A small matrix product costs less than calling it. Once two microbatches in a row have made the same calls, calls of the
same sizes form a `Group`: their rows and gradients are stacked, and one `bmm` computes all their weight gradients. That
is done only where it yields the same bits as one product after the other, which is tried once for each size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

MOST_PRODUCTS = 1 << 18
"""Above so many multiplications a product costs more than its call."""

MOST_BYTES = 1 << 20
"""Weight gradients of a group, which exist at the same time."""


class Group:
    """Calls of one size: the parameters, and the places of the calls in the order of the forward."""

    __slots__ = ("parameters", "places", "with_bias")

    def __init__(self, slots: Sequence[Any], places: list[int], *, with_bias: bool) -> None:
        self.places = places
        self.with_bias = with_bias
        self.parameters: tuple[Tensor, ...] = tuple(slots[place].weight for place in places)
        if with_bias:
            self.parameters += tuple(slots[place].bias for place in places)

    def gradients(self, rows: Tensor, grads: Tensor) -> tuple[Tensor, ...]:
        """In the order of `parameters`, from stacked rows and stacked gradients."""
        found: tuple[Tensor, ...] = torch.bmm(grads.mT, rows).unbind(0)
        return found + grads.sum(1).unbind(0) if self.with_bias else found


class Grouping:
    """How the calls of a forward fall into groups; `singles` are the places of the others."""

    __slots__ = ("groups", "singles", "slots")

    def __init__(self, slots: list[Any]) -> None:
        self.slots = slots
        sizes: dict[Any, list[int]] = {}
        for place, slot in enumerate(slots):
            sizes.setdefault(_size(slot) or place, []).append(place)
        self.groups: list[Group] = []
        self.singles: list[int] = []
        for size, places in sizes.items():
            most = len(places) if isinstance(size, int) else _most(size)
            for start in range(0, len(places), max(most, 1)):
                part = places[start : start + max(most, 1)]
                if len(part) > 1 and same_bits(len(part), *size[:5], torch.get_num_threads()):
                    self.groups.append(Group(slots, part, with_bias=size[5]))
                else:
                    self.singles += part

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


def _size(slot: Any) -> tuple[Any, ...] | None:
    """What calls must have in common to form a group; None if the call is better done alone."""
    outputs, inputs = slot.weight.shape
    rows = slot.anchor.shape[0]
    if slot.transposed or slot.cast is not None or not rows or rows * inputs * outputs > MOST_PRODUCTS:
        return None
    trained = slot.bias is not None and slot.bias.requires_grad
    if trained and slot.bias.dtype is not slot.dtype:
        return None
    return rows, inputs, outputs, slot.dtype, slot.weight.device, trained


def _most(size: tuple[Any, ...]) -> int:
    _, inputs, outputs, dtype = size[:4]
    return int(MOST_BYTES // (inputs * outputs * dtype.itemsize))


@lru_cache(maxsize=4096)
def same_bits(
    count: int, rows: int, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device, threads: int
) -> bool:
    """Whether the batched product gives the bits of single ones: a matter of the kernels chosen for these sizes."""
    x = (
        torch.arange(count * rows * inputs, dtype=torch.float64, device=device)
        .sin()
        .to(dtype)
        .view(count, rows, inputs)
    )
    g = torch.arange(count * rows * outputs, dtype=torch.float64, device=device).cos().to(dtype)
    g = g.view(count, rows, outputs)
    products, sums = torch.bmm(g.mT, x), g.sum(1)
    return all(
        torch.equal(products[k], g[k].clone().t().mm(x[k].clone())) and torch.equal(sums[k], g[k].clone().sum(0))
        for k in range(count)
    )
