"""How one step of a run changes the model: which batches, in which precision, clipped at what, at which learning rate.

The pipeline and the unpipelined model that it is compared with ask here, so they do the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import nn

from penstock.batch import batch_size_of, split_batch, split_target
from penstock.errors import PenstockError, SplitError
from penstock.front import Pipeline
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


@dataclass(frozen=True)
class Update:
    """For example ``update.apply(pipe, update.optimizer(pipe.parameters()), step)``, on every rank."""

    job: Job
    options: TrainOptions
    rate: Callable[[int], float] | None  # the factor of the learning rate, by step
    scaler: torch.amp.GradScaler | None = field(default=None, compare=False)  # for fp16
    replica: int = 0

    @classmethod
    def of(cls, options: TrainOptions, job: Job, *, replica: int = 0) -> Update:
        scaler = torch.amp.GradScaler(options.device) if options.precision == "fp16" else None
        return cls(job, options, rate_of(options, job), scaler, replica)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Rated:
        made = self.job.optimizer(parameters)
        return Rated(made, tuple(group["lr"] for group in made.param_groups))

    def batches(self, step: int) -> list[Batch]:
        """The whole batches of a step."""
        count = self.options.accumulate
        return [self.job.batch(step * count + number) for number in range(count)]

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

    def apply(self, pipe: Pipeline, rated: Rated, step: int) -> tuple[float, float]:
        """One step of the pipeline: the mean loss of its batches, and the norm of the gradients before clipping."""
        losses = []
        with self.casting():
            for args, target in map(self.share, self.batches(step)):
                result = pipe.step(*args, target=target)
                losses.append(float("nan") if result.loss is None else result.loss)
        norm = self.finish(rated, step, pipe.parameters(), pipe.clip_grad_norm_)
        return sum(losses) / len(losses), norm

    def set_rate(self, rated: Rated, step: int) -> None:
        """The learning rate of a step."""
        if self.rate is not None:
            for group, rate in zip(rated.optimizer.param_groups, rated.rates, strict=True):
                group["lr"] = rate * self.rate(step)

    def finish(
        self, rated: Rated, step: int, parameters: Iterable[nn.Parameter], clip: Callable[[float], float]
    ) -> float:
        """Let the optimizer work with the mean gradients of the batches of a step; their norm before `clip` comes back."""
        if self.scaler is not None:
            self.scaler.unscale_(rated.optimizer)
        grads = [p.grad for p in parameters if p.grad is not None]
        if self.options.accumulate > 1 and grads:
            torch._foreach_mul_(grads, 1.0 / self.options.accumulate)
        norm = clip(self.options.clip or math.inf)
        self.set_rate(rated, step)
        if self.scaler is None:
            rated.optimizer.step()
        else:
            self.scaler.step(rated.optimizer)
            self.scaler.update()
        rated.optimizer.zero_grad()
        return norm


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
