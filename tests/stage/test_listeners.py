"""Who is found to listen to gradients, and that what nobody listens to is added as autograd adds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.stage.equal_products import GradientBatch, unpack
from penstock.stage.listeners import Listeners, any_node_kept


def make(*, value: float | None = 0.1) -> tuple[Tensor, ...]:
    """Parameters whose gradients are this."""
    torch.manual_seed(0)
    parameters = tuple(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).parameters())
    for parameter in parameters:
        parameter.grad = None if value is None else torch.full_like(parameter, value)
    return parameters


def ones(parameters: tuple[Tensor, ...]) -> list[Tensor]:
    return [torch.ones_like(parameter) for parameter in parameters]


def node_of(parameter: Tensor) -> Any:
    return parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


@pytest.mark.parametrize("at", range(4))
def test_a_node_that_somebody_keeps_is_found_until_it_is_let_go(at: int) -> None:
    parameters = make()
    assert not any_node_kept(parameters)
    node = node_of(parameters[at])
    node.register_hook(lambda *_: None)
    assert any_node_kept(parameters)
    assert not Listeners().add(parameters, ones(parameters))
    del node
    assert not any_node_kept(parameters)
    assert Listeners().add(parameters, ones(parameters))


HOOKS: list[Callable[[Tensor], Any]] = [
    lambda parameter: parameter.register_hook(lambda grad: None),
    lambda parameter: parameter.register_post_accumulate_grad_hook(lambda parameter: None),
]


@pytest.mark.parametrize("hang", HOOKS)
def test_a_hook_of_a_parameter_is_found_in_mid_step_too(hang: Callable[[Tensor], Any]) -> None:
    parameters, listeners = make(), Listeners()
    assert listeners.add(parameters, ones(parameters))
    hook = hang(parameters[2])
    assert not listeners.add(parameters, ones(parameters))
    hook.remove()
    assert listeners.add(parameters, ones(parameters))


def test_what_is_added_quietly_is_what_autograd_adds() -> None:
    grads = [torch.randn_like(parameter) for parameter in make()]
    quiet, loud = make(), make()
    before = [parameter.grad for parameter in quiet]
    assert Listeners().add(quiet, grads)
    torch.autograd.backward(loud, grads)
    for one, other, old in zip(quiet, loud, before, strict=True):
        assert one.grad is old
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def test_where_there_is_nothing_to_add_to_it_is_left_to_the_engine() -> None:
    """Also in the middle of a step, if somebody takes the gradients away."""
    parameters, listeners = make(value=None), Listeners()
    assert not listeners.add(parameters, ones(parameters))
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    assert listeners.add(parameters, ones(parameters))
    parameters[1].grad = None
    assert not listeners.add(parameters, ones(parameters))
    assert parameters[0].grad is not None
    assert parameters[0].grad.eq(1).all()


def test_other_parameters_are_looked_at_anew() -> None:
    first, second, listeners = make(), make(), Listeners()
    assert listeners.add(first, ones(first))
    node = node_of(second[0])
    assert not listeners.add(second, ones(second))
    assert node is not None


@pytest.mark.parametrize("apart", [False, True])
def test_gradients_in_batches_are_added_where_the_old_ones_lie_together(apart: bool) -> None:
    """Here the weights are a batch, and the biases come alone."""
    parameters = tuple(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).parameters())
    packing = GradientBatch((1,)), GradientBatch((3,)), GradientBatch(places=(2, 0), shape=(3, 3))
    listeners = Listeners()
    for number in (1, 2, 3):
        values = [torch.ones(3), 2 * torch.ones(3), torch.arange(18.0).view(2, 3, 3)]
        added = listeners.add(parameters, values, packing)
        assert added is (number == 1 or not apart)
        if not added:
            assert listeners.add(parameters, unpack(packing, values))
        if apart:
            parameters[0].grad = parameters[0].grad.clone()  # type: ignore[union-attr]
        expected = [torch.arange(9.0, 18.0).view(3, 3), torch.ones(3), torch.arange(9.0).view(3, 3), 2 * torch.ones(3)]
        for parameter, grad in zip(parameters, expected, strict=True):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, number * grad)
            assert not parameter.grad._is_view()


def test_a_parameter_that_comes_twice_is_left_to_the_engine() -> None:
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.zeros(2)
    assert not Listeners().add((weight, weight), (torch.ones(2), torch.ones(2)))
    assert weight.grad.sum() == 0
