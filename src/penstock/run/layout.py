"""What a message looks like: found in band in the first step with a signature, known to both ends from then on.

In a *cold* step each message is preceded by a header of fixed size (two numbers: how many messages have arrived the other way,
and how long its description is) and its description (JSON as bytes: shapes, types, the nest of the value). Both ends keep it
as a layout; the *warm* steps that follow send tensors and nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.dtypes import dtype_name, dtype_named
from penstock.errors import ShapeError, StageError
from penstock.health.decoding import loads, reading
from penstock.stage.boundary import SINGLE, Spec
from penstock.stage.dtensors import DTensorLayout, from_local, layout_of, to_local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One tensor at a boundary between stages."""

    shape: tuple[int, ...]  # of what travels: the local part of a distributed tensor
    dtype: torch.dtype
    requires_grad: bool
    distributed: DTensorLayout | None = None
    on_host: bool = True  # for the sender alone: the receiver has a device of its own
    order: tuple[int, ...] | None = None  # of its dimensions in memory, if that is another one and is to be kept

    @classmethod
    def of(cls, tensor: Tensor, *, ordered: bool = False) -> TensorLayout:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
            raise StageError(
                f"a {kind} tensor of shape {list(tensor.shape)} cannot be sent to another rank; expected a plain one. "
                "Send its parts (indices and values, values and offsets), or tensor.to_dense()"
            )
        distributed = layout_of(tensor)
        local = tensor if distributed is None else to_local(tensor)
        order = order_of(tensor) if ordered and distributed is None else None
        return cls(tuple(local.shape), tensor.dtype, tensor.requires_grad, distributed, tensor.is_cpu, order)

    def matches(self, tensor: Tensor) -> bool:
        if self.distributed is not None or (type(tensor) is not Tensor and layout_of(tensor) is not None):
            return TensorLayout.of(tensor) == self
        same = tensor.shape == self.shape and tensor.dtype is self.dtype and tensor.is_cpu is self.on_host
        return same and tensor.requires_grad is self.requires_grad

    def to_json(self) -> list[object]:
        spread = None if self.distributed is None else self.distributed.to_json()
        order = None if self.order is None else list(self.order)
        return [list(self.shape), dtype_name(self.dtype), self.requires_grad, spread, order]

    @classmethod
    def from_json(cls, row: list[Any]) -> TensorLayout:
        shape, dtype, requires_grad, spread, order = row
        whole = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
        if not whole or len(shape) > 64 or not isinstance(requires_grad, bool):
            raise ValueError(f"{row!r:.80} describes no tensor")
        if math.prod(shape) >= 1 << 48:
            raise ValueError(f"a tensor of shape {shape!r:.80} is more than any memory holds")
        if order is not None:
            if not isinstance(order, list) or any(type(d) is not int for d in order):
                raise ValueError(f"{row!r:.80} describes no tensor")
            if sorted(order) != list(range(len(shape))):
                raise ValueError(f"{order!r:.80} is no order of {len(shape)} dimensions")
            order = tuple(order)
        distributed = None if spread is None else DTensorLayout.from_json(spread)
        return cls(tuple(shape), dtype_named(dtype), requires_grad, distributed, order=order)

    def empty(self, device: torch.device) -> Tensor:
        if self.order is None:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        strides, size = [0] * len(self.shape), 1
        for dimension in reversed(self.order):
            strides[dimension] = size
            size *= max(self.shape[dimension], 1)
        return torch.empty_strided(self.shape, strides, dtype=self.dtype, device=device)

    def zeros(self, device: torch.device) -> Tensor:
        return self.empty(device).zero_()

    def __str__(self) -> str:
        place = "" if self.on_host else " on the device"
        return f"{dtype_name(self.dtype)}{list(self.shape)}{place}{' with gradient' if self.requires_grad else ''}"


@dataclass(frozen=True, slots=True)
class Layout:
    """One message. Forward, it has the tensors of a value and the nest that they came in. Backward, it has the gradient of each
    of those tensors, None where there is none; a DTensor's gradient may be spread in another way than itself."""

    tensors: tuple[TensorLayout | None, ...]
    spec: Spec | None  # None: gradients

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], spec: Spec | None = None, *, ordered: bool = False) -> Layout:
        """`ordered`: with the order of dimensions in memory, which the other end is to keep."""
        return cls(tuple(None if one is None else TensorLayout.of(one, ordered=ordered) for one in tensors), spec)

    @classmethod
    def decode(cls, tensors: tuple[TensorLayout | None, ...], nest: object) -> Layout:
        """What `described` gave."""
        with reading("the nest of a message"):
            return cls(tensors, None if nest is None else Spec.from_json(nest))

    def encode(self) -> bytes:
        rows = [None if tensor is None else tensor.to_json() for tensor in self.tensors]
        return json.dumps([rows, None if self.spec is None else self.spec.to_json()]).encode()

    def check_device(self, device: torch.device, stage: int, microbatch: int) -> None:
        """Before a cold message is sent: can it be?"""
        tensors = [tensor for tensor in self.tensors if tensor is not None]
        if any(tensor.on_host is not (device.type == "cpu") for tensor in tensors):
            found = ", ".join(f"{tensor} {'in host memory' if tensor.on_host else ''}".rstrip() for tensor in tensors)
            raise ShapeError(
                f"the output of stage {stage} for microbatch {microbatch} is ({found}), but the messages of this pipeline are "
                f"between tensors on {device.type}; move it there at the end of the stage: tensor.to({device.type!r})"
            )

    def check(self, tensors: Sequence[Tensor], spec: Spec, stage: int, microbatch: int) -> None:
        """Before a warm message is sent: is it what the other end expects?"""
        if spec is SINGLE is self.spec:  # one tensor each
            expected, tensor = self.tensors[0], tensors[0]
            if (
                expected is not None
                and tensor.shape == expected.shape
                and tensor.dtype is expected.dtype
                and tensor.requires_grad is expected.requires_grad
                and tensor.is_cpu is expected.on_host
                and expected.distributed is None
                and type(tensor) is Tensor
            ):
                return
        if len(tensors) == len(self.tensors) and spec == self.spec:
            if all(own is not None and own.matches(one) for own, one in zip(self.tensors, tensors, strict=True)):
                return
        now, then = (", ".join(map(str, one.tensors)) for one in (Layout.of(tensors), self))
        nest = "" if spec == self.spec else f", in {spec} instead of {self.spec}"
        raise ShapeError(
            f"the output of stage {stage} for microbatch {microbatch} is ({now}), but the first step with inputs of these "
            f"shapes gave ({then}){nest}. If layers were frozen or unfrozen, call step again: it starts afresh. If it changes "
            "from step to step for other reasons than the shape of the first stage's input, make the schedule with dynamic=True"
        )


def described(blob: bytes) -> tuple[tuple[TensorLayout | None, ...], object]:
    """The tensors of a cold message, by its own description, and its nest as it came. The tensors must be received before
    anything can go wrong with the nest (a class that is not known here), so that the messages behind it stay in step."""
    with reading("the description of a message"):
        rows, nest = loads(blob, tuple[list[Any], object])
        tensors = tuple(None if row is None else TensorLayout.from_json(row) for row in rows)
        if nest is not None and None in tensors:
            raise ValueError(f"{rows!r:.80} leaves out a tensor of a value")
        return tensors, nest


def settle(layouts: Sequence[Layout | None], grads: Sequence[Layout | None]) -> list[Layout | None]:
    """After a cold step: a tensor that had a gradient in some microbatch is expected to have one in each. Values stay.

    Which microbatches leave a value without one may depend on the data; from the next step on, those send zeros. Both ends
    know all layouts of the step, and come to the same.
    """
    some = {place for grad in grads if grad is not None for place, t in enumerate(grad.tensors) if t is not None}
    settled: list[Layout | None] = []
    for layout, grad in zip(layouts, grads, strict=True):
        if layout is not None and grad is not None and grad.spec is None:
            found = list(grad.tensors)
            for place, value in enumerate(layout.tensors[: len(found)]):
                if place in some and found[place] is None and value and value.requires_grad and not value.distributed:
                    found[place] = TensorLayout(value.shape, value.dtype, requires_grad=False)
            grad = Layout(tuple(found), None)
        settled.append(grad)
    return settled


def order_of(tensor: Tensor) -> tuple[int, ...] | None:
    """The dimensions of a tensor from the one that memory goes through last; None: as they are numbered.

    Random numbers are drawn in this order: whoever draws as many for a tensor draws others for one with other strides.

    >>> order_of(torch.zeros(2, 3).t()), order_of(torch.zeros(2, 3)), order_of(torch.zeros(2, 3).t()[:, :1])
    ((1, 0), None, None)
    """
    if tensor.is_contiguous():
        return None
    strides = torch.empty_like(tensor, device="meta", requires_grad=False).stride()  # of a result of the same kind
    order = tuple(sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension]))
    return None if order == tuple(range(tensor.dim())) else order


def wire(tensor: Tensor, order: tuple[int, ...] | None = None) -> Tensor:
    """What is sent of a tensor: its local part, contiguous in this order of its dimensions, with its values in memory as they
    are, without its graph."""
    local = tensor if type(tensor) is Tensor else to_local(tensor)
    if local.is_conj() or local.is_neg():  # conjugated or negated by a mark, which does not travel
        local = local.resolve_conj().resolve_neg()
    if order is not None:
        local = local.permute(order)
    return local if local.is_contiguous() else local.contiguous()


def dense(grad: Tensor) -> Tensor:
    """A gradient as it is sent. That of a table in which few rows were looked up may be sparse."""
    return grad.to_dense() if grad.is_sparse else grad


def unwire(local: Tensor, layout: TensorLayout, mesh: DeviceMesh | None) -> Tensor:
    """What the receiver makes of it."""
    return local if layout.distributed is None else from_local(local, layout.distributed, mesh)
