"""Head and loss over one slice of rows at a time: the logits of all rows are never there together, forwards or backwards.

    class Model(nn.Module):
        def forward(self, tokens, labels):
            return penstock.chunked_loss(self.body(tokens), labels, self.head, rows=2048)

A linear head with cross-entropy is one operator of its own, which a captured model keeps as it is. Any other head or loss is
computed slice by slice under checkpoints. Either way the logits of a slice are computed again in the backward, and the
gradient of the head's weight is there after the input pass of a split backward: to put it off would mean to hold the gradients of
all logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from penstock.errors import RunError, StageError
from penstock.misfits import takes
from penstock.stage.held import momentary
from penstock.stage.intercept import undeferred

ROWS = 1024


@takes(RunError)
def chunked_loss(
    hidden: Tensor,
    target: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    rows: int = ROWS,
    loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> Tensor:
    """The loss of ``head(hidden)``, with the logits of at most `rows` rows in memory at a time; exact to rounding.

        loss = penstock.chunked_loss(hidden, labels, model.head)                      # cross-entropy
        smooth = functools.partial(F.cross_entropy, reduction="sum", label_smoothing=0.1)
        loss = penstock.chunked_loss(hidden, labels, model.head, loss_fn=smooth)      # any other

    `hidden` is [..., width], `target` [...] (or [..., classes] for a loss that takes such). A `loss_fn` of your own gets the
    logits and the targets of a slice and returns their **sum**; for reduction="mean" the total is divided by the number of
    targets that are not `ignore_index`, as `torch.nn.functional.cross_entropy` does.
    """
    if reduction not in ("mean", "sum"):
        raise StageError(f'chunked_loss: reduction={reduction!r}; expected "mean" or "sum"')
    if rows < 1:
        raise StageError(f"chunked_loss: rows={rows}; expected at least 1 row in a slice")
    if tuple(target.shape[: hidden.dim() - 1]) != tuple(hidden.shape[:-1]):
        raise StageError(
            f"chunked_loss: hidden is {list(hidden.shape)}, target {list(target.shape)}; expected a target for each row of "
            "hidden, [..., width] and [...]"
        )
    flat, labels = hidden.flatten(0, -2), target.flatten(0, hidden.dim() - 2)
    if loss_fn is None and type(head) is nn.Linear and not head._forward_hooks and not head._forward_pre_hooks:
        total = _cross_entropy(flat, labels, head, rows, ignore_index)
    else:
        own = loss_fn or _Sum(ignore_index)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, flat.shape[0], rows):
            piece = flat[start : start + rows], labels[start : start + rows]
            total = total + checkpoint(_slice, head, own, *piece, use_reentrant=False)
    if reduction == "sum":
        return total
    whole = labels.is_floating_point() or labels.dim() > 1
    count = labels.shape[0] if whole else (labels != ignore_index).sum()
    return total / count


def _precision(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _precise(logits: Tensor) -> Tensor:
    return logits.to(_precision(logits.dtype))


class _Sum:
    """Cross-entropy, summed."""

    def __init__(self, ignore_index: int) -> None:
        self.ignore_index = ignore_index

    def __call__(self, logits: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(_precise(logits), target, ignore_index=self.ignore_index, reduction="sum")


def _slice(head: Any, loss_fn: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, target: Tensor) -> Tensor:
    with undeferred():
        return loss_fn(head(hidden), target)


def _cross_entropy(hidden: Tensor, target: Tensor, head: nn.Linear, rows: int, ignore_index: int) -> Tensor:
    weight: Tensor = head.weight
    bias: Tensor | None = head.bias
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        cast = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(cast), weight.to(cast)
        bias = None if bias is None else bias.to(cast)
    made: Tensor = torch.ops.penstock.chunked_cross_entropy(hidden, weight, bias, target, rows, ignore_index)
    return made


@torch.library.custom_op("penstock::chunked_cross_entropy", mutates_args=())
def _forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, rows: int, ignore_index: int
) -> Tensor:
    """The sum of the cross-entropies of all rows."""
    total = torch.zeros((), dtype=_precision(hidden.dtype), device=hidden.device)
    for piece, labels in zip(hidden.split(rows), target.split(rows), strict=True):
        logits = _precise(functional.linear(piece, weight, bias))
        momentary(2 * logits.nbytes)
        total += functional.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")
        del logits
    return total


@_forward.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, rows: int, ignore_index: int) -> Tensor:
    return torch.empty((), dtype=_precision(hidden.dtype), device=hidden.device)


@torch.library.custom_op("penstock::chunked_cross_entropy_backward", mutates_args=())
def _backward(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, rows: int, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of hidden, weight and bias: the logits of a slice again, and at once what becomes of them."""
    to_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    to_weight = torch.zeros_like(weight, memory_format=torch.contiguous_format)
    to_bias = torch.zeros(weight.shape[0] if bias is not None else 0, dtype=weight.dtype, device=weight.device)
    for piece, labels, place in zip(hidden.split(rows), target.split(rows), to_hidden.split(rows), strict=True):
        logits = _precise(functional.linear(piece, weight, bias))
        momentary(2 * logits.nbytes)
        slopes = logits.softmax(1)
        del logits
        counted = labels != ignore_index
        slopes.scatter_add_(1, labels.where(counted, 0)[:, None], -torch.ones_like(slopes[:, :1]))
        slopes *= (grad * counted)[:, None]
        slopes = slopes.to(weight.dtype)
        torch.mm(slopes, weight, out=place)
        to_weight.addmm_(slopes.t(), piece)
        if bias is not None:
            to_bias += slopes.sum(0)
        del slopes
    return to_hidden, to_weight, to_bias


@_backward.register_fake
def _(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, rows: int, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    size = weight.shape[0] if bias is not None else 0
    return torch.empty_like(hidden), torch.empty_like(weight), weight.new_empty(size)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    hidden, weight, bias, target, ctx.rows, ctx.ignore_index = inputs
    ctx.save_for_backward(hidden, weight, bias, target)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    to_hidden, to_weight, to_bias = torch.ops.penstock.chunked_cross_entropy_backward(
        grad, *saved, ctx.rows, ctx.ignore_index
    )
    return to_hidden, to_weight, to_bias if saved[2] is not None else None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)
