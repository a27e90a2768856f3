"""The loss of a model that computes it itself."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from penstock.nest import Value


class OwnLoss:
    """The loss of a model that returns it (``labels=``): a part of its output, which `pick` takes out."""

    def __init__(self, pick: Callable[[Value], Tensor]) -> None:
        self.pick = pick

    def __call__(self, output: object, target: object = None) -> Tensor:
        return self.pick(output)
