"""Stages run one by one with cut graphs between them, as ranks would: every received tensor is a fresh leaf."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.capture import Pipe


def forward_backward(
    pipe: Pipe, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss_of: Callable[[Any], Tensor]
) -> Any:
    """The model's output; gradients end up in the parameters, stage by stage."""
    info = pipe.info()
    made: dict[str, Any] = {}
    received: list[dict[str, Any]] = []
    arguments = info.inputs.bind(args, kwargs)
    output = None
    for k in range(pipe.num_stages):
        stage = pipe.get_stage_module(k)
        leaves = {w.name: _leaf(made[w.name]) for w in stage.inputs if w.source is not None}
        received.append(leaves)
        values = [arguments[w.name] if w.source is None else leaves[w.name] for w in stage.inputs]
        result = stage(*values)
        if stage.is_last:
            output = result
        else:
            made |= dict(zip([w.name for w in stage.outputs], result, strict=True))
    grads: dict[str, Tensor] = {}
    for k in reversed(range(pipe.num_stages)):
        stage = pipe.get_stage_module(k)
        if stage.is_last:
            loss_of(output).backward()
        else:
            pairs = [(made[w.name], grads[w.name]) for w in stage.outputs if w.name in grads]
            if pairs:
                torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])
        for name, leaf in received[k].items():
            if isinstance(leaf, Tensor) and leaf.grad is not None:
                grads[name] = leaf.grad if name not in grads else grads[name] + leaf.grad
    return output


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().contiguous().requires_grad_(value.requires_grad)


def assert_same(one: Any, other: Any) -> None:
    """The same class, the same tensors, bit by bit."""
    from penstock.capture.model_values import model_values

    assert type(one) is type(other)
    ones, recipe = model_values.flatten(one)
    others, other_recipe = model_values.flatten(other)
    assert recipe == other_recipe
    for a, b in zip(ones, others, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def assert_same_grads(model: torch.nn.Module, reference: torch.nn.Module) -> None:
    grads = dict(reference.named_parameters())
    for name, value in model.named_parameters():
        expected = grads[name].grad
        if expected is None:
            assert value.grad is None or not value.grad.any(), name
        else:
            assert value.grad is not None, name
            torch.testing.assert_close(value.grad, expected, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
