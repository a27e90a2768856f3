"""A backward in two parts, and hooks that are called when a gradient has been added up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.regressions.plain_loop import MICROBATCHES, WIDTH, batch, difference, looped, trained


class UsedElsewhere(nn.Module):
    """Uses the weight of its layer a second time, outside of it, for the microbatches that it is told."""

    def __init__(self, microbatches: frozenset[int]) -> None:
        super().__init__()
        self.layer, self.microbatches, self.calls = nn.Linear(WIDTH, WIDTH), microbatches, 0

    def forward(self, x: Tensor) -> Tensor:
        number, self.calls = self.calls % MICROBATCHES, self.calls + 1
        output = self.layer(x)
        return output + self.layer.weight.sum() if number in self.microbatches else output


def counted(microbatches: frozenset[int]) -> tuple[list[nn.Module], list[int]]:
    """Stages, and how often hooks after accumulation were called so far."""
    torch.manual_seed(0)
    modules: list[nn.Module] = [UsedElsewhere(microbatches).double() for _ in range(2)]
    calls = [0]

    def count(parameter: Tensor) -> None:
        calls[0] += 1

    for module in modules:
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(count)
    return modules, calls


_FAILS = pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="a weight that some microbatches use outside of its layer is accumulated twice by a split backward",
)


@pytest.mark.parametrize(
    "microbatches",
    [
        pytest.param(frozenset(), id="none"),
        pytest.param(frozenset(range(MICROBATCHES)), id="all"),
        pytest.param(frozenset({1, 3}), id="some", marks=_FAILS),
    ],
)
def test_hooks_after_accumulation_are_called_as_often_as_in_a_loop(microbatches: frozenset[int]) -> None:
    """They fired 27 times for 24, so an optimizer inside of the backward would step three times more."""
    (modules, calls), (plain, expected) = counted(microbatches), counted(microbatches)
    found = trained(modules, batch(), schedule="zb-h1", steps=3)
    if difference(found, looped(plain, batch(), steps=3)) > 1e-12:
        pytest.fail("the gradients differ", pytrace=False)
    assert calls == expected
