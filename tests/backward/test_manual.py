"""Weight gradients that a function of the user computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.backward.engine_protocol import Output
from penstock.backward.full import ManualEngine
from penstock.errors import StageError


def doubled(x: Tensor) -> Any:
    def run(args: Any, kwargs: Any) -> Output:
        return Output(None, [x * 2])

    return run


def test_the_weight_pass_calls_what_the_builder_returned() -> None:
    log: list[str] = []
    x = torch.ones(2, requires_grad=True)
    found, _ = ManualEngine(lambda: lambda: log.append("weight")).forward(doubled(x), (), {})
    found.backward_input([(0, torch.ones(2))])
    assert (x.grad.tolist(), log) == ([2.0, 2.0], [])  # type: ignore[union-attr]
    found.backward_weight()
    assert (x.grad.tolist(), log) == ([2.0, 2.0], ["weight"])  # type: ignore[union-attr]


def test_a_builder_that_is_no_function() -> None:
    with pytest.raises(StageError, match=r"dw_builder must be a function .* got 3"):
        ManualEngine(3).begin_step(None)  # type: ignore[arg-type]
    found, _ = ManualEngine(lambda: None).forward(doubled(torch.ones(2, requires_grad=True)), (), {})  # type: ignore[arg-type, return-value]
    with pytest.raises(StageError, match=r"must return a function without arguments .* got None"):
        found.backward_input([(0, torch.ones(2))])
