"""What the ranks of a pipeline in host memory tell one another after a step; `on_device.py` has the same for accelerators."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.front.ends import Ends
from penstock.front.result import Numbers, Told
from penstock.front.spread import share_losses
from penstock.front.weighted import WeightedSchedule
from penstock.plan import Placement


class OnHost:
    """The ranks of one pipeline, which read numbers as soon as they are there."""

    def __init__(self, ends: Ends, placement: Placement) -> None:
        self._ends, self._last = ends, placement.ranks[-1]

    def tell(
        self, schedule: WeightedSchedule, losses: Sequence[Tensor], *, shares: bool, overflow: Tensor | None
    ) -> Told:
        """After a step that succeeded: all ranks of all replicas call it."""
        if overflow is not None:
            overflow = torch.tensor([float(self._ends.any(bool(overflow)))])
        numbers = [float(loss) for loss in losses]
        total = schedule.total(numbers) if numbers else None
        if shares:
            known = bool(losses) or self._ends.rank != self._last  # else it was an evaluation without a target
            total, *numbers = share_losses(self._ends, total, numbers, count=schedule.num_microbatches, last=self._last)
            if not known:
                total, numbers = None, []
        found: Numbers = total, tuple(numbers)
        return Told(lambda: found, overflow)
