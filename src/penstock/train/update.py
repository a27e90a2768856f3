"""How one step of a run changes the model: which batches, in which precision, clipped at what, at which learning rate.

Before training a few steps of the pipeline are compared with the same steps of the unpipelined model, in one process; both go
the same way through `Update.apply`.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from penstock.batch import batch_size_of, sizes_of, split_batch, split_target, weights
from penstock.batch.policy import RowPolicy
from penstock.capture import Pipe
from penstock.capture.stage_module import run_stages
from penstock.errors import PenstockError, SplitError
from penstock.front import Pipeline, Result
from penstock.front.norm import shrink
from penstock.front.spread import gather_on_first
from penstock.nest import Value, map_tensors
from penstock.plan import Plan
from penstock.run.planning import weight_order
from penstock.run.rng import microbatch_rng
from penstock.stage.dtensors import whole_tensor
from penstock.train.history import Checked
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

    def apply(self, model: Pipeline | Unpipelined, rated: Rated, step: int) -> tuple[float, float]:
        """One step with the mean gradients of its batches: their mean loss, and the norm of the gradients before clipping."""
        losses, count = [], self.options.accumulate
        with self.casting():
            for number in range(step * count, (step + 1) * count):
                args, target = self.share(self.job.batch(number))
                loss = model.step(*args, target=target).loss
                losses.append(math.nan if loss is None else loss)
        self.scaler.unscale_(rated.optimizer)
        shrink([p.grad for p in model.parameters() if p.grad is not None], 1.0 / count)
        norm = model.clip_grad_norm_(self.options.clip or math.inf)
        self.set_rate(rated, step)
        self.scaler.step(rated.optimizer)
        self.scaler.update()
        rated.optimizer.zero_grad()
        return sum(losses) / count, norm

    def first_losses(self, model: Pipeline | Unpipelined, steps: int) -> list[float]:
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


class Unpipelined:
    """The model in one process, which takes steps as a `Pipeline` does: a plain loop over the microbatches.

    `order` is that of the microbatches (see `backward_order`): sums of the same numbers in another order differ in the
    last digits. A model that draws random numbers is run stage by stage, so that each stage draws what it draws in the pipeline.
    """

    def __init__(self, update: Update, model: nn.Module, order: Sequence[int], *, whole: Pipe | None = None) -> None:
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.update, self.model, self.whole, self.order = update, model, whole, order
        self.steps = 0
        self.parameters = model.parameters

    def clip_grad_norm_(self, most: float) -> float:
        """As `Pipeline.clip_grad_norm_` does it in one process: the same numbers in the same order."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        squares = (float(torch.linalg.vector_norm(g.detach(), 2.0).to(torch.float64) ** 2.0) for g in grads)
        total: float = sum(squares) ** 0.5
        shrink(grads, most / (total + 1e-6))
        return total

    def step(self, *args: Value, target: Value) -> Result:
        """The loss of a whole batch; its gradients are added to those that are there."""
        args, target = map_tensors(lambda tensor: tensor.to(self.device), (args, target))
        size = min(len(self.order), batch_size_of(args) or len(self.order))  # as a Pipeline with few_rows=True
        pieces, _ = split_batch(args, {}, size)
        targets = split_target(target, size)
        shares = [float(share) for share in weights(sizes_of(targets) or [1] * size)]
        losses, scale = [0.0] * size, float(RowPolicy(scaler=self.update.scaler).scale(self.device))
        for microbatch in (number for number in self.order if number < size):
            loss = self.loss(self.output(pieces[microbatch], microbatch), targets[microbatch])
            torch.autograd.backward(loss, torch.full_like(loss, shares[microbatch] * scale))
            losses[microbatch] = loss.item()
        self.steps += 1
        mean = sum(share * loss for share, loss in zip(shares, losses, strict=True))
        return Result(lambda: (mean, tuple(losses)), loss_tensor=torch.tensor(mean, device=self.device))

    def loss(self, output: Value, target: Value) -> Tensor:
        if self.update.job.loss_fn is None:
            return output.loss if hasattr(output, "loss") else output["loss"]  # type: ignore[no-any-return]
        return self.update.job.loss_fn(output, target)

    def output(self, args: tuple[object, ...], microbatch: int) -> Value:
        if self.whole is None:
            return self.model(*args)
        values = self.whole.info().inputs.bind(args, {})
        *earlier, last = map(self.whole.get_stage_module, range(self.whole.num_stages))
        drawn_by = partial(microbatch_rng, seed=self.update.options.seed, microbatch=microbatch, step=self.steps)
        for stage in earlier:
            with drawn_by(stage=stage.stage_index):
                run_stages([stage], values)
        with drawn_by(stage=last.stage_index):
            return last(*(values[wire.name] for wire in last.inputs))


def is_random(model: nn.Module) -> bool:
    """Whether training draws random numbers, as far as one can see."""
    modules = list(model.modules())
    dropouts = [m.p if isinstance(m, nn.modules.dropout._DropoutNd) else getattr(m, "dropout", 0.0) for m in modules]
    rates = [rate for rate in dropouts if isinstance(rate, int | float)]
    return any(rate > 0 for rate in rates) or any(isinstance(module, nn.RReLU) for module in modules)


def check(pipe: Pipeline, update: Update) -> Checked:
    """Run both for some steps from the same start; the pipeline and the model are put back afterwards."""
    steps = update.options.check_steps
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    reference, seconds = None, 0.0
    expected: list[float] = []
    if pipe.is_first:
        reference = _reference(pipe, update)
        start = time.perf_counter()
        expected = reference.update.first_losses(reference, steps)
        seconds = (time.perf_counter() - start) / steps
    pipe.ranks.barrier("the unpipelined steps")
    losses = update.first_losses(pipe, steps)
    difference = 0.0
    state = {name: whole_tensor(value) for name, value in pipe.state_dict().items()}
    parts = gather_on_first(pipe.transport, state) if update.replica == 0 else []
    if reference is not None:
        whole = reference.model.state_dict()
        pairs = [(value, whole[name]) for part in parts for name, value in part.items() if value.numel()]
        apart = [(value.double() - other.double()).abs().max().item() for value, other in pairs]
        difference = max([*apart, *(abs(a - b) for a, b in zip(losses, expected, strict=True))])
    for name, value in pipe.state_dict().items():
        value.copy_(before[name])
    pipe.schedule.steps = 0
    difference, seconds = pipe.ranks.try_all("the result of the check", lambda: (difference, seconds))[0]
    return Checked(steps, difference, seconds, "stage by stage" if is_random(update.job.model) else "the model itself")


def backward_order(plan: Plan) -> list[int]:
    """The order in which the microbatches' gradients add up, if it is the same in all stages; else 0, 1, 2, ...

    >>> from penstock.schedules import get_schedule
    >>> backward_order(get_schedule("1f1b")(2, 3)), backward_order(get_schedule("loopedbfs")(2, 3))
    ([0, 1, 2], [2, 1, 0])
    """
    orders = weight_order(plan)
    first = orders[0]
    return first if all(order == first for order in orders.values()) else list(range(plan.num_microbatches))


def _reference(pipe: Pipeline, update: Update) -> Unpipelined:
    device = pipe.stages[0].device
    model = copy.deepcopy(update.job.model).cpu()  # the stages of this rank may share its parameters, and be elsewhere
    whole = pipe.whole(model) if is_random(model) else None
    model.to(device)
    if whole is not None:
        whole.to(device)
    alone = Update(replace(update.options, dp=1), update.job)
    return Unpipelined(alone, model, backward_order(pipe.plan), whole=whole)
