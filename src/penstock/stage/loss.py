"""The loss of a model that computes it itself."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from penstock.errors import StageError
from penstock.stage.boundary import flatten


class OwnLoss:
    """The loss of a model that returns it (``labels=``): one of the tensors of its output."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(self, output: Any, target: Any = None) -> Tensor:
        tensors, _ = flatten(output)
        if self.index >= len(tensors):
            raise StageError(f"the model's loss should be tensor {self.index} of its output, which has {len(tensors)}")
        return tensors[self.index]
