"""Whether anybody waits to hear of gradients: hooks of parameters, and hooks of autograd's nodes that accumulate them.

    listeners = Listeners()                        # one for each step of a stage
    if listeners.none(parameters):
        accumulate_quietly(parameters, grads)      # `.grad` grows, and autograd's engine is not asked

The engine takes longer for a small parameter than the addition itself. DDP and others hang hooks on the node that accumulates
a parameter, which cannot be seen. But the node of a parameter is made anew whenever it is asked for, unless somebody keeps
it, as everybody must who hangs something on it: a mark that is still there a moment later tells that somebody does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_MARK = "penstock.stage.listeners"


class Listeners:
    """Who listens to the parameters of a stage in one step. Hooks of nodes are looked for once, those of parameters always."""

    def __init__(self) -> None:
        self.unheard: dict[int, Tensor] = {}  # by `id`, the parameters whose nodes nobody keeps

    def none(self, parameters: Sequence[Tensor]) -> bool:
        """Whether nobody listens to any of these."""
        if _have_hooks(parameters):
            return False
        if self.unheard.keys() >= set(map(id, parameters)):
            return True
        if any_node_kept(parameters):
            return False
        self.unheard.update((id(parameter), parameter) for parameter in parameters)
        return True


def any_node_kept(parameters: Sequence[Tensor]) -> bool:
    """Whether someone keeps the node of autograd that accumulates one of these."""
    wanted = tuple([parameter for parameter in parameters if parameter.requires_grad])
    if not wanted:
        return False
    _mark(wanted)
    return any(_MARK in node.metadata for node, _ in _nodes(wanted))


def _have_hooks(parameters: Sequence[Tensor]) -> bool:
    return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)


def accumulate_quietly(parameters: Sequence[Tensor], grads: Sequence[Tensor]) -> bool:
    """Add the gradients to those that are there, as the engine would; False, and nothing done, if that is more than adding."""
    if len(set(map(id, parameters))) < len(parameters):
        return False  # the engine adds up what is of one parameter first
    found: list[Tensor] = []
    for parameter, grad in zip(parameters, grads, strict=True):
        old = parameter.grad
        if old is None or type(old) is not Tensor or old.dtype is not grad.dtype or old.layout is not torch.strided:
            return False
        found.append(old)
    torch._foreach_add_(found, list(grads))
    return True


class _Probe(torch.autograd.Function):
    """One node that has all the parameters before it."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise AssertionError("nobody differentiates a probe")


def _mark(parameters: tuple[Tensor, ...]) -> None:
    """Mark the nodes, and keep none of them."""
    for node, _ in _nodes(parameters):
        node.metadata[_MARK] = True


def _nodes(parameters: tuple[Tensor, ...]) -> Any:
    with torch.enable_grad():
        return _Probe.apply(*parameters).grad_fn.next_functions  # type: ignore[no-untyped-call]
