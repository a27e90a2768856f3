"""Weight work of many small layers of one size, done by one batched product.

A small matrix product costs less than calling it. Once two microbatches in a row have made the same calls, calls of the
same sizes form a `Group`: their rows and gradients are stacked, and one `bmm` computes all their weight gradients. That
is done only where it yields the same bits as one product after the other, which is tried once for each size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.stage.calls import Slot

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
        sizes: dict[_Size | int, list[int]] = {}
        for place, slot in enumerate(slots):
            sizes.setdefault(_size(slot) or place, []).append(place)
        self.groups: list[Group] = []
        self.singles: list[int] = []
        for size, places in sizes.items():
            if isinstance(size, int):
                self.singles += places
                continue
            most = max(MOST_BYTES // (size.inputs * size.outputs * size.dtype.itemsize), 1)
            for part in (places[start : start + most] for start in range(0, len(places), most)):
                if len(part) > 1 and same_bits(len(part), *size[:5], torch.get_num_threads()):
                    self.groups.append(Group(slots, part, with_bias=size.with_bias))
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


class _Size(NamedTuple):
    """What calls must have in common to form a group."""

    rows: int
    inputs: int
    outputs: int
    dtype: torch.dtype
    device: torch.device
    with_bias: bool


def _size(slot: Slot) -> _Size | None:
    """None if the call is better done alone."""
    (outputs, inputs), rows, bias = slot.call.weight.shape, slot.anchor.shape[0], slot.bias
    if slot.transposed or slot.cast is not None or not rows or rows * inputs * outputs > MOST_PRODUCTS:
        return None
    if bias is not None and bias.requires_grad and bias.dtype is not slot.dtype:
        return None
    return _Size(rows, inputs, outputs, slot.dtype, slot.anchor.device, bias is not None and bias.requires_grad)


@lru_cache(maxsize=4096)
def same_bits(
    count: int, rows: int, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device, threads: int
) -> bool:
    """Whether the batched product gives the bits of single ones: a matter of the kernels chosen for these sizes."""
    numbers = torch.arange(count * rows * max(inputs, outputs), dtype=torch.float64, device=device)
    x = numbers[: count * rows * inputs].sin().to(dtype).view(count, rows, inputs)
    g = numbers[: count * rows * outputs].cos().to(dtype).view(count, rows, outputs)
    products, sums = torch.bmm(g.mT, x), g.sum(1)
    return all(
        torch.equal(products[k], g[k].clone().t().mm(x[k].clone())) and torch.equal(sums[k], g[k].clone().sum(0))
        for k in range(count)
    )
