"""The schedule of a Pipeline: it also says what the microbatches' losses weigh, and scales the loss for a GradScaler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.front.loss_weights import LossWeights, Shares
from penstock.front.norm import precise_on
from penstock.nest import Value, map_tensors
from penstock.run.checksums import Comparison
from penstock.run.feed import Feed
from penstock.run.inputs import Given, StepInputs
from penstock.run.program import Program
from penstock.run.runner import Outcome, Prepared
from penstock.run.schedule import Schedule
from penstock.stage.dtensors import whole_tensor


class WeightedSchedule(Schedule):
    """A `Schedule` whose weights can be asked for, and multiplied."""

    factor: float | Tensor = 1.0  # of the loss before the backward; the loss that is reported stays as it is
    loss_weights: LossWeights | None = None  # what the loss of a microbatch counts, if not its rows
    spread: bool = False  # whether stages are DTensors over dimensions of a mesh beside dp and pp
    problem: Exception | None = None  # what is wrong with this rank's batch: told to the other ranks in the step
    _shares: Shares | None = None
    _copies: torch.Stream | None = None  # for copies of the batch to the device
    _comparison: Comparison | None = None  # of what the ranks are given

    def _prepare(self, program: Program, given: Given) -> Prepared:
        prepared = super()._prepare(program, given)
        if self._comparison is None:
            self._comparison = Comparison(everything=self.stages[0].routes is not None)
        if self._transport.num_ranks > 1:
            step, train = self._transport.epoch + 1, program.setting.grad
            prepared.checksums = self._comparison.checksums(
                given.args, given.kwargs, given.target, step=step, train=train
            )
        return prepared

    def _cut(self, given: Given, *, train: bool) -> StepInputs:
        problem, self.problem = self.problem, None
        if problem is not None:
            raise problem
        inputs = super()._cut(given, train=train)
        device = self.stages[0].device
        if device.type != "cpu":  # the batch may be in host memory all the same
            if self._copies is None:
                self._copies = torch.Stream(device=device)
            inputs.feed = Feed(device, self._copies)
        return inputs

    def _weights(self, inputs: StepInputs) -> Sequence[float | Tensor] | None:
        self._shares = self.shares(inputs)
        return self._scaled(self._shares)

    def shares(self, inputs: StepInputs) -> Shares | None:
        """How much the loss of each microbatch counts in that of the batch; None: each is a part of it as it is."""
        by_rows = super()._weights(inputs)
        if by_rows is None or len(by_rows) == 1 or self.loss_weights is None or inputs.targets is None:
            return by_rows
        rows = [float(share) for share in by_rows]
        known = self.loss_weights.shares(inputs, rows)
        if known is None:  # the first output will tell
            inputs.look = partial(self._look, self.loss_weights, inputs, rows)
        return rows if known is None else known

    def _look(self, weights: LossWeights, inputs: StepInputs, rows: list[float], output: Value, target: Value) -> None:
        self._shares = weights.seen(inputs, rows, output, target)
        inputs.weights = self._scaled(self._shares)

    def _scaled(self, shares: Shares | None) -> Shares | None:
        """What losses are multiplied by before their backward: with the factor of a GradScaler, which nobody here reads."""
        factor = self.factor
        if isinstance(factor, Tensor):  # a share of a batch is rounded once, to the type of the loss
            factor = factor.to(precise_on(factor.device))
            return [factor * share for share in shares or [1.0] * self.num_microbatches]
        return shares

    def _run(self, given: Given, *, train: bool) -> Outcome:
        if not self.spread:
            return super()._run(given, train=train)
        from torch.distributed.tensor.experimental import implicit_replication

        with implicit_replication():  # a plain tensor that meets a DTensor (a mask, a target) is the same on all ranks
            return super()._run(given, train=train)

    def _merge(self, outcome: Outcome, given: Given, losses: list[Tensor] | None) -> Value:
        value = super()._merge(outcome, given, losses)
        return map_tensors(whole_tensor, value) if self.spread and value is not None else value

    def check_call(self, name: str, target: object, loss_kwargs: object) -> None:
        """Say what cannot be before anything runs."""
        if loss_kwargs is not None and not isinstance(loss_kwargs, Mapping):
            raise RunError(
                f"loss_kwargs is a {type(loss_kwargs).__name__}; expected a dictionary of arguments of the loss"
            )
        if self.loss_fn is None and (target is not None or name == "step"):
            raise RunError(
                f"{name}() {'with a target ' if target is not None else ''}without a loss: nothing could be differentiated or "
                "reported. Give Pipeline(..., loss_fn=function), or call predict() for the outputs alone"
            )

    def total(self, losses: Tensor | Sequence[object]) -> Value:
        """The loss of the whole batch, of numbers in a list or in a tensor."""
        if not self.scale_grads or self._shares is None or len(self._shares) != len(losses):
            return sum(losses) if not self.scale_grads else sum(losses) / len(losses)
        return sum(_counted(share, loss) for share, loss in zip(self._shares, losses, strict=True))


def _counted(share: float | Tensor, loss: Value) -> Value:
    """A part of the loss of a batch; 0 where nothing counts, since the mean of nothing is no number."""
    if isinstance(share, Tensor):
        return torch.where(share > 0, share * loss, torch.zeros_like(share))
    return share * loss if share > 0 else 0.0
