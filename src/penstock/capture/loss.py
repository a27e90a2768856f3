"""A loss inside the model: the last stage computes it, and no loss function is needed.

pipe = pipeline(TrivialLossWrapper(model, nn.MSELoss()), (x, target), ...)
pipe.info().loss_index          # 0
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class LossWrapper(nn.Module):
    """A model and its loss; a subclass says in ``forward`` how they go together.

    ``loss_spec`` says which part of what ``forward`` returns is the loss: True for all of it, or the same structure
    with True at its place.
    """

    loss_spec: Any = None

    def __init__(self, module: nn.Module, loss_fn: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{type(self).__name__} must say how the model and its loss go together: define forward, "
            "or use TrivialLossWrapper for loss_fn(module(x), targets)"
        )


class TrivialLossWrapper(LossWrapper):
    """``loss_fn(module(x), targets)``."""

    loss_spec = True

    def forward(self, x: Any, targets: Any) -> torch.Tensor:
        return self.loss_fn(self.module(x), targets)
