"""Head and loss over one slice of rows at a time: the logits of all rows are never there together, forwards or backwards.

    class Model(nn.Module):
        def forward(self, tokens, labels):
            return penstock.chunked_loss(self.body(tokens), labels, self.head, rows=2048)

A linear head with cross-entropy is one operator of its own, which a captured model keeps as it is. Any other head or loss is
computed slice by slice under checkpoints. Either way the logits of a slice are computed again in the backward, and the
gradient of the head's weight is there after the input pass of a split backward: to put it off would mean to hold the gradients of
all logits. The gradients of the slices are added up in float32, however small the type of the head: where they were rounded to it
one after another, those of later slices would be lost in the sum of the earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from penstock.checks import check_types
from penstock.errors import RunError, StageError
from penstock.nest import Value
from penstock.stage.held import momentary
from penstock.stage.intercept import undeferred

ROWS = 1024


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
    if not (isinstance(hidden, Tensor) and isinstance(target, Tensor)):
        check_types("chunked_loss", RunError, hidden=(hidden, Tensor), target=(target, Tensor))
    if not callable(head) or (loss_fn is not None and not callable(loss_fn)):
        check_types("chunked_loss", RunError, head=(head, Callable), loss_fn=(loss_fn, Callable | None))
    if not (isinstance(rows, int | torch.SymInt) and isinstance(ignore_index, int)):
        check_types("chunked_loss", RunError, rows=(rows, int), ignore_index=(ignore_index, int))
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
        own = loss_fn or partial(_summed, ignore_index=ignore_index)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        head_of_slice = _in_slices(head)
        for start in range(0, flat.shape[0], rows):
            piece = flat[start : start + rows], labels[start : start + rows]
            total = total + checkpoint(_slice, head_of_slice(), own, *piece, use_reentrant=False)
    if reduction == "sum":
        return total
    whole = labels.is_floating_point() or labels.dim() > 1
    count = labels.shape[0] if whole else (labels != ignore_index).sum()
    return total / count


def _precision(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _precise(logits: Tensor) -> Tensor:
    return logits.to(_precision(logits.dtype))


def _summed(logits: Tensor, target: Tensor, *, ignore_index: int) -> Tensor:
    return functional.cross_entropy(_precise(logits), target, ignore_index=ignore_index, reduction="sum")


def _slice(
    head: Callable[[Tensor], Tensor], loss_fn: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, target: Tensor
) -> Tensor:
    with undeferred():
        return loss_fn(head(hidden), target)


def _in_slices(head: Callable[[Tensor], Tensor]) -> Callable[[], Callable[[Tensor], Tensor]]:
    """The head for each slice, such that the gradients of its parameters are added up in float32."""
    if not isinstance(head, nn.Module) or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return lambda: head
    own = {name: p for name, p in head.named_parameters() if type(p) is nn.Parameter and p.requires_grad}
    small = {name: p for name, p in own.items() if p.dtype in (torch.bfloat16, torch.float16)}
    if any(torch.is_autocast_enabled(kind) for kind in {p.device.type for p in own.values()}):
        small = own  # autocast would keep one cast of them for all slices, which would add up in its type
    if not small:
        return lambda: head
    sums: dict[str, Tensor] = {}
    shared = {name: _InSlices.apply(p, sums, name, True) for name, p in small.items()}  # type: ignore[no-untyped-call]

    def of_slice() -> Callable[[Tensor], Tensor]:
        used = {name: _InSlices.apply(p, sums, name, False) for name, p in shared.items()}  # type: ignore[no-untyped-call]
        return lambda hidden: torch.func.functional_call(head, used, (hidden,))

    return of_slice


class _InSlices(torch.autograd.Function):
    """A parameter as it is, of whose gradients the sum is somewhere else: in one slice, whose gradient is added to it, or as all
    slices share it, whose backward comes after theirs and takes the sum."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, sums: dict[str, Tensor], name: str, shared: bool) -> Tensor:
        ctx.sums, ctx.name, ctx.shared, ctx.dtype = sums, name, shared, parameter.dtype
        ctx.set_materialize_grads(False)
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        total = ctx.sums.pop(ctx.name, None)
        if ctx.shared:
            return None if total is None else total.to(ctx.dtype), None, None, None
        grad = grads[0].to(_precision(ctx.dtype))  # type: ignore[union-attr]
        ctx.sums[ctx.name] = grad if total is None else total.add_(grad)
        return None, None, None, None


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
    precision, (words, width) = _precision(weight.dtype), weight.shape
    to_weight = torch.zeros(weight.shape, dtype=precision, device=weight.device)
    to_bias = torch.zeros(words if bias is not None else 0, dtype=precision, device=weight.device)
    exact = precision is weight.dtype
    # Else products of a slice are made apart, of so many words at a time that they are no larger than its logits were.
    each = words if width <= 3 * rows else max(1, 3 * words * rows // width)
    for piece, labels, place in zip(hidden.split(rows), target.split(rows), to_hidden.split(rows), strict=True):
        logits = _precise(functional.linear(piece, weight, bias))
        momentary(2 * logits.nbytes + (0 if exact else to_weight.nbytes))
        slopes = logits.softmax(1)
        del logits
        counted = labels != ignore_index
        slopes.scatter_add_(1, labels.where(counted, 0)[:, None], -torch.ones_like(slopes[:, :1]))
        slopes *= (grad * counted)[:, None]
        slopes = slopes.to(weight.dtype)
        torch.mm(slopes, weight, out=place)
        if exact:
            to_weight.addmm_(slopes.t(), piece)
        else:
            for part, part_of_slopes in zip(to_weight.split(each), slopes.t().split(each), strict=True):
                part += part_of_slopes @ piece
        if bias is not None:
            to_bias += slopes.sum(0, dtype=precision)
        del slopes
    return to_hidden, to_weight.to(weight.dtype), to_bias.to(weight.dtype)


@_backward.register_fake
def _(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, rows: int, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    size = weight.shape[0] if bias is not None else 0
    return torch.empty_like(hidden), torch.empty_like(weight), weight.new_empty(size)


def _keep(ctx: Any, inputs: tuple[Value, ...], output: Tensor) -> None:
    hidden, weight, bias, target, ctx.rows, ctx.ignore_index = inputs
    ctx.save_for_backward(hidden, weight, bias, target)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    to_hidden, to_weight, to_bias = torch.ops.penstock.chunked_cross_entropy_backward(
        grad, *saved, ctx.rows, ctx.ignore_index
    )
    return to_hidden, to_weight, to_bias if saved[2] is not None else None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)
