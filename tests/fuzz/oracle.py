"""The plain loop: what a case must give, in one process, with the model as it is.

Microbatch after microbatch, each loss weighed by its rows; where rows are grouped otherwise, the batch as a whole.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from tests.fuzz.cases import Case
from tests.fuzz.models import IGNORED, LOSSES, Batch, Model, make_model, sizes_of

SCALE = 1024.0  # of a GradScaler


@dataclass
class Left:
    """What an action left: numbers that it returned, and tensors by name. What is None is not compared."""

    what: str
    loss: float | None = None
    norm: float | None = None
    outputs: Tensor | None = None
    grads: dict[str, Tensor | None] | None = None
    state: dict[str, Tensor] = field(default_factory=dict)
    fired: dict[str, int] = field(default_factory=dict)  # how often hooks after accumulation were called
    aliases: set[str] = field(default_factory=set)  # names that are not the first of their parameter


def make_optimizer(case: Case, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if case.optimizer == "adam":
        return torch.optim.AdamW(parameters, lr=0.01, eps=0.01)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9 if case.optimizer == "momentum" else 0.0)


class InBackward:
    """An optimizer for each parameter, which steps as soon as the gradient of the last microbatch is there."""

    def __init__(self, case: Case, parameters: list[nn.Parameter]) -> None:
        self.case = case
        self.counts: dict[nn.Parameter, int] = dict.fromkeys(parameters, 0)
        self.optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in parameters}
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self.hear)

    def hear(self, parameter: Tensor) -> None:
        self.counts[parameter] += 1  # type: ignore[index]
        if self.counts[parameter] % self.case.microbatches == 0:  # type: ignore[index]
            self.optimizers[parameter].step()  # type: ignore[index]
            self.optimizers[parameter].zero_grad()  # type: ignore[index]


class Counts:
    """How often the hook after accumulation of each parameter is called."""

    def __init__(self, named: list[tuple[str, nn.Parameter]]) -> None:
        self.fired = dict.fromkeys((name for name, _ in named), 0)
        for name, parameter in named:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.hear(name))

    def hear(self, name: str) -> None:
        self.fired[name] += 1


class Oracle:
    """The loop with its model, its optimizer and what it has saved."""

    def __init__(self, case: Case) -> None:
        self.case = case
        # Slices of rows are penstock's own: the loop has the loss of all rows at once.
        self.model = make_model(replace(case, loss="own") if case.loss == "chunked" else case)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.in_backward = InBackward(case, trained) if case.optimizer == "backward" else None
        self.optimizer = make_optimizer(case, trained) if trained else None
        self.counts = Counts(list(self.model.named_parameters())) if case.options.get("count_hooks") else None
        self.saved: Any = None
        self.trained = 0  # steps
        self.unscaled = False

    def run(self) -> list[Left]:
        return [self.act(number, action) for number, action in enumerate(self.case.actions)]

    def act(self, number: int, action: Any) -> Left:
        left = Left(f"action {number}, {action['do']}")
        getattr(self, action["do"])(left, action, number)
        left.grads = {name: grad_of(p) for name, p in self.model.named_parameters(remove_duplicate=False)}
        left.state = {name: v.detach().clone() for name, v in self.model.state_dict().items()}
        left.aliases = set(left.grads) - {name for name, _ in self.model.named_parameters()}
        if self.counts is not None:
            left.fired = dict(self.counts.fired)
        return left

    # -- actions

    def train(self, left: Left, action: Any, number: int) -> None:
        if action.get("zero", True):
            self.model.zero_grad()
        left.loss, left.outputs = self.replicas(action, number, train=True)
        self.trained += 1

    def unsynced(self, left: Left, action: Any, number: int) -> None:
        self.train(left, {**action, "zero": False}, number)

    def evaluate(self, left: Left, action: Any, number: int) -> None:
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        with torch.no_grad():
            left.loss, left.outputs = self.replicas(action, number, train=False)
        for module, mode in modes:
            module.training = mode

    def clip(self, left: Left, action: Any, number: int) -> None:
        found = [p for p in self.model.parameters() if p.grad is not None]
        if self.case.options.get("loss_scale"):
            for parameter in found:
                parameter.grad.div_(SCALE)  # type: ignore[union-attr]
        left.norm = float(nn.utils.clip_grad_norm_(found, action["max"], action["norm"]))
        self.unscaled = True

    def optimize(self, left: Left, action: Any, number: int) -> None:
        if self.case.options.get("loss_scale") and not self.unscaled:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(SCALE)
        self.unscaled = False
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad()

    def save(self, left: Left, action: Any, number: int) -> None:
        of_optimizer = None if self.optimizer is None else copy.deepcopy(self.optimizer.state_dict())
        self.saved = copy.deepcopy(self.model.state_dict()), of_optimizer, self.trained

    def load(self, left: Left, action: Any, number: int) -> None:
        if self.saved is None:
            return
        weights, of_optimizer, self.trained = copy.deepcopy(self.saved)
        self.model.load_state_dict(weights)
        if self.optimizer is not None:
            self.optimizer.load_state_dict(of_optimizer)

    def rebuild(self, left: Left, action: Any, number: int) -> None:
        self.model.zero_grad()

    def replan(self, left: Left, action: Any, number: int) -> None:
        """Another plan for the same stages: nothing that the loop knows of."""

    calibrate = replan

    # -- the loop

    def replicas(self, action: Any, number: int, *, train: bool) -> tuple[float, Tensor | None]:
        """The mean over replicas, each with its own rows."""
        total, outputs = 0.0, None
        for replica in range(self.case.replicas):
            batch = Batch(self.case, action["rows"], number=number, replica=replica, length=action.get("length", 3))
            loss, outputs = self.batch(batch, action["rows"], train=train)
            total += loss / self.case.replicas
        return total, outputs if self.case.replicas == 1 else None

    def batch(self, batch: Batch, rows: int, *, train: bool) -> tuple[float, Tensor | None]:
        case = self.case
        whole = bool(case.options.get("group_rows"))
        sizes = sizes_of(rows, 1 if whole else min(case.microbatches, rows))
        parts = batch.cut(sizes)
        weights = [1.0 if case.loss == "sum" else size / rows for size in sizes]
        if case.loss == "padded":
            counts = [int((target != IGNORED).sum()) for _, target, _ in parts]
            weights = [count / sum(counts) for count in counts]
        factor = SCALE if case.options.get("loss_scale") else 1.0
        total, outputs = 0.0, []
        for number, ((x, target, kwargs), weight) in enumerate(zip(parts, weights, strict=True)):
            output = forward(self.model, case, (x, kwargs), number, self.trained)
            loss = output if case.has_own_loss else LOSSES[case.loss](output, target)
            total += float(loss.detach()) * weight
            outputs.append(output.detach())
            if train and loss.requires_grad:
                (loss * (weight * factor / case.replicas)).backward()
        return total, None if case.has_own_loss else torch.cat(outputs)


def forward(model: Model, case: Case, given: tuple[Tensor, dict[str, Tensor]], microbatch: int, step: int) -> Tensor:
    """The model, with the random numbers of each stage where there are such."""
    x, kwargs = given
    if case.options.get("rng") is None:
        return model(x, **kwargs)

    handles = []
    contexts: list[Any] = [nullcontext()]

    def enter(stage: int) -> Any:
        def hook(*_: Any) -> None:
            contexts[-1].__exit__(None, None, None)
            seed = case.options.get("seed", 0)
            contexts.append(penstock.microbatch_rng(seed=seed, stage=stage, microbatch=microbatch, step=step))
            contexts[-1].__enter__()

        return hook

    contexts[0].__enter__()
    for stage, (first, _) in enumerate(case.bounds):
        handles.append(model.blocks[first].register_forward_pre_hook(enter(stage), prepend=True))
    try:
        return model(x, **kwargs)
    finally:
        contexts[-1].__exit__(None, None, None)
        for handle in handles:
            handle.remove()


def grad_of(parameter: nn.Parameter) -> Tensor | None:
    if parameter.grad is None:
        return None
    grad = parameter.grad.detach()
    return grad.to_dense().clone() if grad.is_sparse else grad.clone()
