"""Weight gradients of linear layers, put off: what one forward remembers, and what the weight pass makes of it.

A linear layer computes with an alias of its weight that needs no gradient, so that the input pass skips the weight. In
place of its bias stands an *anchor*: a leaf that looks like the bias repeated for every row. Autograd accumulates the
gradient of the layer's output in the anchor's `.grad` (it moves there, nothing is copied and no Python runs), whatever
happens to the output later: views, in-place activations, no use at all. A layer without bias gets an anchor of -0.0,
which changes no bit of a sum. The input and that gradient are all that the weight pass needs.

Anchors are kept from microbatch to microbatch: the n-th call of the forward finds them in the n-th `Slot`. That is safe
because an anchor's `.grad` is filled and emptied within one input pass.

Two cases go through an autograd function instead, which costs more: under saved-tensor hooks (non-reentrant
checkpointing, offloading) it lets the hooks have the input; and on devices other than CPU it leaves the kernel, and so
every bit of the forward, as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.parameter import Parameter

Operator = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Computes (rows, frozen weight, bias or anchor) -> output, for rows of two dimensions."""


class Call(NamedTuple):
    """Which parameters one call of a linear operator used, and how."""

    weight: Parameter
    bias: Tensor | None
    transposed: bool  # the weight is (inputs, outputs), as `addmm` takes it; `linear` takes (outputs, inputs)


Work = tuple[Call, Tensor, Tensor]
"""The weight work of one call, all that is kept between the passes: its rows and the gradients of its output rows."""


class Slot:
    """The n-th linear call of a stage's forward, as the last microbatch left it."""

    __slots__ = (
        "anchor", "bias", "bias_pointer", "call", "cast", "dtype", "frozen", "output_shape", "rows_shape", "shape",
        "transposed", "versions", "weight", "weight_pointer",
    )  # fmt: skip

    def __init__(self, call: Call, x: Tensor, *, cast: torch.dtype | None) -> None:
        weight, bias, self.transposed = call
        self.call = call
        self.weight: Parameter | None = weight
        self.bias = bias
        self.shape = x.shape
        self.weight_pointer = weight.data_ptr()
        self.bias_pointer = 0 if bias is None else bias.data_ptr()
        self.cast = cast
        self.versions = versions(weight, bias)
        self.frozen = weight.detach() if cast is None else weight.detach().to(cast)
        self.dtype = self.frozen.dtype
        width, features = weight.shape if self.transposed else (weight.shape[1], weight.shape[0])
        rows = x.numel() // width
        if bias is None:
            base = torch.full((), -0.0, dtype=self.dtype, device=weight.device)
        else:
            base = bias.detach().to(self.dtype)
        self.anchor = base.expand(rows, features).requires_grad_()
        self.rows_shape = None if x.dim() == 2 else (rows, width)
        self.output_shape = (*x.shape[:-1], features)

    def apply(self, operator: Operator, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and the rows to keep for the weight pass."""
        if self.cast is not None:
            x = x.to(self.cast)
        return _apply(operator, x, frozen=self.frozen, bias=self.anchor, fused=self.bias is None)


class Nothing(Slot):
    """Stands behind the last slot and matches no call."""

    __slots__ = ()

    def __init__(self) -> None:
        self.weight = None


def versions(weight: Tensor, bias: Tensor | None) -> tuple[int, int]:
    return weight._version, -1 if bias is None else bias._version


def _apply(operator: Operator, x: Tensor, *, frozen: Tensor, bias: Tensor | None, fused: bool) -> tuple[Tensor, Tensor]:
    """As torch does it for a weight that needs a gradient: one matrix product of rows, fused with the bias or not."""
    if x.dim() == 2:
        return operator(x, frozen, bias), x
    rows = x.reshape(-1, x.shape[-1])
    if fused or bias is None or x.is_contiguous():
        output = operator(rows, frozen, bias)
    else:
        output = operator(rows, frozen, None) + bias
    return output.view(*x.shape[:-1], output.shape[-1]), rows


class DeferredLinear(torch.autograd.Function):
    """A linear layer whose backward yields the gradient of its input and leaves the rest to the weight pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, root: Tensor, frozen: Tensor, bias: Tensor | None, call: Call, work: list[Work],
        operator: Operator,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, frozen)
        ctx.call, ctx.work = call, work
        return _apply(operator, x, frozen=frozen, bias=bias, fused=False)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, frozen = ctx.saved_tensors
        rows, row_grads = x, grad
        if grad.dim() != 2:
            rows, row_grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        ctx.work.append((ctx.call, rows.data, row_grads))
        input_grad = None
        if ctx.needs_input_grad[0]:
            input_grad = row_grads.mm(frozen.t() if ctx.call.transposed else frozen)
            if grad.dim() != 2:
                input_grad = input_grad.view(x.shape)
        return input_grad, None, None, None, None, None, None
