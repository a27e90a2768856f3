"""The weight pass: gradients out of rows and row gradients, handed to the engine with the parameters as roots."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from torch import Tensor

from penstock.stage.batched import Group
from penstock.stage.calls import Work
from penstock.stage.engine import run_engine

ENGINE_CALL_BYTES = 1 << 20
"""Weight gradients handed to the engine at once: enough to make its cost vanish, few enough to stay in the cache."""


def accumulate(work: list[Work], roots: tuple[Tensor, ...] = (), grads: tuple[Tensor, ...] = ()) -> None:
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
    first: dict[int, int] = {}
    order = [first.setdefault(id(call.weight), position) for position, (call, _, _) in enumerate(work)]
    if len(first) == len(work):
        return work
    return [item for _, item in sorted(zip(order, work, strict=True), key=lambda pair: pair[0])]
