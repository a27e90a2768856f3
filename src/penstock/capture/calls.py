"""Operators that captured stages call by way of ``torch.nn.functional``, looked up at each call.

A split backward puts its own function in place of the linear operator while a stage runs; captured stages must call
what stands there, as the user's modules do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


def addmm(bias: Tensor, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if beta == 1 and alpha == 1:
        return torch.addmm(bias, x, weight)
    return torch.addmm(bias, x, weight, beta=beta, alpha=alpha)


def checkpointed(body: Callable[..., Any], *args: Any) -> Any:
    """Run a part of a stage without keeping what its backward needs; the backward computes it again."""
    return checkpoint(body, *args, use_reentrant=False)
