"""The autograd engine, called with as little as possible in between.

>>> x = torch.ones(2, requires_grad=True)
>>> run_engine((x * 3,), (torch.ones(2),))
>>> x.grad
tensor([3., 3.])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward

run_on_host: Callable[..., object] = torch.autograd.Variable._execution_engine.run_backward  # type: ignore[no-untyped-call,unused-ignore]


def run_engine(roots: tuple[Tensor | GradientEdge, ...], grads: tuple[Tensor, ...]) -> None:
    """Differentiate `roots` with `grads`; every leaf that they reach accumulates, every hook fires."""
    if grads[0].is_cpu:
        run_on_host(roots, grads, False, False, (), True, True)
    else:  # devices have engine threads of their own, to which the wrapper hands the context of this one
        _engine_run_backward(roots, grads, False, False, (), allow_unreachable=True, accumulate_grad=True)


def capture(
    roots: tuple[Tensor | GradientEdge, ...], grads: tuple[Tensor, ...], *, inputs: tuple[Tensor, ...]
) -> Sequence[Tensor]:
    """The gradients of `inputs` (None where there is none); nothing accumulates and the graph stays usable."""
    gradients: Sequence[Tensor] = _engine_run_backward(
        roots, grads, True, False, inputs, allow_unreachable=True, accumulate_grad=False
    )
    return gradients


def seeds(outputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What the engine starts from: outputs with a gradient; a lone number without one (a loss) starts with 1."""
    if len(outputs) == 1 and grads[0] is not None:
        return (outputs[0],), (grads[0],)
    roots: list[Tensor] = []
    given: list[Tensor] = []
    for output, grad in zip(outputs, grads, strict=True):
        if not output.requires_grad:
            continue
        if grad is None:
            if output.numel() != 1 or len(outputs) > 1:
                continue
            grad = torch.ones_like(output)
        roots.append(output)
        given.append(grad)
    return tuple(roots), tuple(given)


def nodes_reached(roots: Iterable[Tensor | GradientEdge]) -> set[Node]:
    """Every node of the graph of `roots`. Walks it in Python: for rare use."""
    nodes = [root.grad_fn if isinstance(root, Tensor) else root.node for root in roots]
    stack: list[Node] = [node for node in nodes if node is not None]
    seen = set(stack)
    while stack:
        for following, _ in stack.pop().next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return seen


def leaves_reached(roots: Sequence[Tensor | GradientEdge]) -> set[int]:
    """The `id` of every leaf in which the graph of `roots` would accumulate."""
    found = {id(root) for root in roots if isinstance(root, Tensor) and root.is_leaf}
    leaves = (getattr(node, "variable", None) for node in nodes_reached(roots))  # that of a node which accumulates
    return found.union(id(leaf) for leaf in leaves if leaf is not None)
