"""A forward whose graph stays, without what it saved; and a second run that puts that back, and ends when all is there.

    refill = Refill(needed)
    with saved_tensors_hooks(refill.pack, refill.unpack):
        output = module(x)                  # its graph holds empty places
    refill.fill(lambda: module(x))          # as far as the last of them
    output.sum().backward()

A forward ends with work of which nothing is saved: the product of its last linear layer, its last sum. The second run needs
none of that, so it is left by an exception as soon as the last place is filled. What it would have given is known from the
first run, whose graph the backward goes through.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import StageError
from penstock.nest import Value, map_tensors, tensors_in

PLAIN = (Tensor, nn.Parameter)
"""Tensors that hold their values themselves."""


class _Enough(BaseException):
    """Leaves a forward. No error: whoever catches errors lets it pass."""


class Place:
    """Where a saved tensor was, and will be."""

    __slots__ = ("__weakref__", "dtype", "shape", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.tensor: Tensor | None = None
        self.version = 0

    def keep(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor.detach(), tensor._version  # an output would hold its own graph


class Refill:
    """What the graph of one forward lacks."""

    def __init__(self, needed: Callable[[], NoReturn]) -> None:
        self.needed = needed  # called if somebody asks before it is there
        self.places: list[weakref.ref[Place]] = []  # in order; the graph has them

    def pack(self, tensor: Tensor) -> Place:
        place = Place(tensor)
        self.places.append(weakref.ref(place))
        return place

    def unpack(self, place: Place) -> Tensor:
        if place.tensor is None:
            self.needed()
        if place.tensor._version != place.version:  # autograd asks that only of tensors without hooks
            raise changed_in_place(place.shape)
        return place.tensor

    def fill(self, run: Callable[[], object]) -> None:
        """Run the forward again, until every place that is still there has its tensor."""
        places = [place() for place in self.places]
        self.places = []
        while places and places[-1] is None:
            places.pop()
        count, filled = len(places), 0

        def keep(tensor: Tensor) -> Place | None:
            nonlocal filled
            if filled == count:  # somebody caught what was to end the run
                raise _Enough
            place = places[filled]
            if place is not None:
                if tensor.shape != place.shape or tensor.dtype is not place.dtype:
                    raise StageError(
                        f"the forward saved {name(place)} as number {filled + 1} of the tensors for its backward, and when it "
                        f"was run again {name(tensor)}; {EXPECTED}"
                    )
                place.keep(tensor)
            filled += 1
            if filled == count:
                raise _Enough
            return place

        try:
            if count:
                with saved_tensors_hooks(keep, self.unpack):
                    run()
        except _Enough:
            pass
        except Exception:
            if filled < count:  # else it is an answer to being left
                raise
        finally:
            places.clear()  # from here on the graph alone has them, and lets go of one after the other
        if filled < count:
            raise StageError(
                f"the forward saved {count} tensors for its backward, and when it was run again {filled}; {EXPECTED}"
            )


EXPECTED = (
    "expected the same. What it depends on besides its input (a counter, the time, global state) must not change in "
    "between; or leave the stage out of recompute"
)


def changed_in_place(shape: torch.Size) -> StageError:
    """What is wrong with a saved tensor that is no longer what it was."""
    return StageError(
        f"a tensor of shape {list(shape)} that a forward saved for its backward was changed in place since; "
        "expected it to be left alone: change a copy of it"
    )


class _HollowOutput(torch.autograd.Function):
    """Stands for an output: has its graph, its shape, and no memory."""

    @staticmethod
    def forward(ctx: object, tensor: Tensor) -> Tensor:
        return _hollow(tensor)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0]


def _hollow(tensor: Tensor) -> Tensor:
    return tensor.new_empty_strided(tensor.shape, (0,) * tensor.dim())


def roots(output: Value) -> Value:
    """From which a backward can start as from the output, whose memory they do not hold.

    >>> x = torch.ones(3, requires_grad=True)
    >>> root = roots(2 * x)
    >>> root.backward(torch.ones(3))
    >>> x.grad, root.untyped_storage().nbytes()
    (tensor([2., 2., 2.]), 4)
    """

    def root(tensor: Tensor) -> Tensor:
        return _HollowOutput.apply(tensor) if tensor.requires_grad else _hollow(tensor)  # type: ignore[no-untyped-call]

    return map_tensors(root, output)


def is_plain(output: object) -> bool:
    return all(type(tensor) in PLAIN and tensor.layout is torch.strided for tensor in tensors_in(output))


def name(tensor: Tensor | Place) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
