"""How one step of a run changes the model: which batches, in which precision, clipped at what, at which learning rate.

The pipeline and the unpipelined model that it is compared with ask here, so they do the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import nn

from penstock.batch import batch_size_of, split_batch, split_target
from penstock.errors import PenstockError, SplitError
from penstock.front import Result
from penstock.nest import Value
from penstock.train.train_job import Batch, Job
from penstock.train.train_options import TrainOptions

# The share of the run that is over -> a factor of the learning rate.
RATES: Final[dict[str, Callable[[float], float]]] = {
    "constant": lambda over: 1.0,
    "linear": lambda over: 1.0 - over,
    "cosine": lambda over: 0.5 * (1.0 + math.cos(math.pi * over)),
}
PRECISIONS: Final = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Rated:
    """An optimizer, and the learning rates that it began with: ``rated = update.optimizer(pipe.parameters())``."""

    optimizer: torch.optim.Optimizer
    rates: tuple[float, ...]


class Trained(Protocol):
    """What takes steps: a `Pipeline`, or the unpipelined model that it is compared with."""

    def step(self, *args: Value, target: Value) -> Result: ...

    def parameters(self) -> Iterable[nn.Parameter]: ...

    def clip_grad_norm_(self, max_norm: float, /) -> float: ...


class Update:
    """For example ``update.apply(pipe, update.optimizer(pipe.parameters()), step)``, on every rank."""

    def __init__(self, options: TrainOptions, job: Job, *, replica: int = 0) -> None:
        self.options, self.job, self.replica = options, job, replica
        self.rate = rate_of(options, job)  # the factor of the learning rate, by step
        self.scaler = torch.amp.GradScaler(options.device, enabled=options.precision == "fp16")  # of the loss

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Rated:
        made = self.job.optimizer(parameters)
        return Rated(made, tuple(group["lr"] for group in made.param_groups))

    def share(self, batch: Batch) -> Batch:
        """The rows of a batch that are this replica's."""
        count = self.options.dp
        if count == 1:
            return batch
        args, target = batch
        rows = batch_size_of(args)
        if rows is None or rows % count:
            raise SplitError(f"a batch of {rows or 0} rows over --dp {count} replicas; expected as many for each")
        pieces, _ = split_batch(args, {}, count)
        return pieces[self.replica], split_target(target, count)[self.replica]

    def casting(self) -> AbstractContextManager[object]:
        """Stands around forward and backward."""
        dtype, kind = PRECISIONS[self.options.precision], torch.device(self.options.device).type
        return nullcontext() if dtype is None else torch.autocast(kind, dtype=dtype)

    def set_rate(self, rated: Rated, step: int) -> None:
        """The learning rate of a step."""
        if self.rate is not None:
            for group, rate in zip(rated.optimizer.param_groups, rated.rates, strict=True):
                group["lr"] = rate * self.rate(step)

    def apply(self, model: Trained, rated: Rated, step: int) -> tuple[float, float]:
        """One step with the mean gradients of its batches: their mean loss, and the norm of the gradients before clipping."""
        losses, count = [], self.options.accumulate
        with self.casting():
            for number in range(step * count, (step + 1) * count):
                args, target = self.share(self.job.batch(number))
                loss = model.step(*args, target=target).loss
                losses.append(math.nan if loss is None else loss)
        self.scaler.unscale_(rated.optimizer)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        if count > 1 and grads:
            torch._foreach_mul_(grads, 1.0 / count)
        norm = model.clip_grad_norm_(self.options.clip or math.inf)
        self.set_rate(rated, step)
        self.scaler.step(rated.optimizer)
        self.scaler.update()
        rated.optimizer.zero_grad()
        return sum(losses) / count, norm

    def first_losses(self, model: Trained, steps: int) -> list[float]:
        """Those of so many steps from the beginning, with an optimizer of their own."""
        rated = self.optimizer(model.parameters())
        return [self.apply(model, rated, step)[0] for step in range(steps)]


def rate_of(options: TrainOptions, job: Job) -> Callable[[int], float] | None:
    """What was asked for, or what the job brings.

    >>> from types import SimpleNamespace
    >>> rate = rate_of(SimpleNamespace(rate_schedule="linear", warmup=2, steps=6), SimpleNamespace(rate=None))
    >>> [rate(step) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if options.rate_schedule is None:
        if options.warmup:
            raise PenstockError(f"--warmup {options.warmup} without --rate-schedule; give constant, linear or cosine")
        return job.rate
    shape = RATES[options.rate_schedule]
    warm, left = options.warmup, max(options.steps - options.warmup, 1)
    return lambda step: (step + 1) / warm if step < warm else shape((step - warm) / left)
