"""Who is found to listen to gradients, and that what nobody listens to is added as autograd adds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.stage.listeners import Listeners, accumulate_quietly, any_node_kept


def make() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).parameters())


def node_of(parameter: Tensor) -> Any:
    return parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


@pytest.mark.parametrize("at", range(4))
def test_a_node_that_somebody_keeps_is_found_until_it_is_let_go(at: int) -> None:
    parameters = make()
    assert not any_node_kept(parameters)
    node = node_of(parameters[at])
    node.register_hook(lambda *_: None)
    assert any_node_kept(parameters)
    assert not Listeners().none(parameters)
    del node
    assert not any_node_kept(parameters)
    assert Listeners().none(parameters)


HOOKS: list[Callable[[Tensor], Any]] = [
    lambda parameter: parameter.register_hook(lambda grad: None),
    lambda parameter: parameter.register_post_accumulate_grad_hook(lambda parameter: None),
]


@pytest.mark.parametrize("hang", HOOKS)
def test_a_hook_of_a_parameter_is_found_in_mid_step_too(hang: Callable[[Tensor], Any]) -> None:
    parameters, listeners = make(), Listeners()
    assert listeners.none(parameters)
    hook = hang(parameters[2])
    assert not listeners.none(parameters)
    hook.remove()
    assert listeners.none(parameters)


def test_what_is_added_quietly_is_what_autograd_adds() -> None:
    grads = [torch.randn_like(parameter) for parameter in make()]
    quiet, loud = make(), make()
    assert not accumulate_quietly(quiet, grads)  # there is nothing to add to
    for parameters in (quiet, loud):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.1)
    before = [parameter.grad for parameter in quiet]
    assert accumulate_quietly(quiet, grads)
    torch.autograd.backward(loud, grads)
    for one, other, old in zip(quiet, loud, before, strict=True):
        assert one.grad is old
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def test_a_parameter_that_comes_twice_is_left_to_the_engine() -> None:
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.zeros(2)
    assert not accumulate_quietly((weight, weight), (torch.ones(2), torch.ones(2)))
    assert weight.grad.sum() == 0
