"""The schedule of a Pipeline: it also says what the microbatches' losses weigh, and scales the loss for a GradScaler."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.run.schedule import Schedule
from penstock.run.stage_run import StepInputs


class WeightedSchedule(Schedule):
    """A `Schedule` whose weights can be asked for, and multiplied."""

    factor: float = 1.0  # of the loss before the backward; the loss that is reported stays as it is
    _shares: Sequence[float] | None = None

    def _weights(self, inputs: StepInputs) -> list[float] | None:
        shares = self._shares = super()._weights(inputs)
        if shares is None:
            return None if self.factor == 1.0 else [self.factor] * self.num_microbatches
        return [share * self.factor for share in shares]

    @property
    def has_loss(self) -> bool:
        return self.loss_fn is not None

    def total(self, losses: Sequence[float]) -> float:
        """The loss of the whole batch."""
        if not self.scale_grads or self._shares is None or len(self._shares) != len(losses):
            return sum(losses) if not self.scale_grads else sum(losses) / len(losses)
        return sum(share * loss for share, loss in zip(self._shares, losses, strict=True))
