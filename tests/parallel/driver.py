"""One stage driven as the runtime drives it, by a short script, and the plain loop that it must equal.

A script is the plan of one stage: "U F0 F1 B0 B1 G R" gathers, runs two microbatches, reduces (G) and frees.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.errors import ReplicaFailed
from penstock.parallel import DataParallel, adapt
from penstock.stage.backward import (
    Deferral,
    Pending,
    backward_input,
    backward_weight,
    run_backward_full,
    run_deferred,
)

WIDTH = 6
FULL = "U F0 F1 B0 F2 B1 B2 G R"
SPLIT = "U F0 F1 I0 F2 I1 W0 W1 I2 W2 G R"
FREED = "U F0 F1 R U I0 R U I1 W0 R U F2 I2 W1 W2 R G"  # parameters are gathered anew between the passes
SCRIPTS = {"full": FULL, "split": SPLIT, "freed": FREED}


class Block(nn.Module):
    """Parameters that wait for the weight pass (linear) and parameters that do not (norm, scale)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.norm(self.first(x)))) * self.scale


def make_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(Block(), Block()).to(dtype)


def freeze_some(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        if name.endswith(("first.weight", "1.scale")):
            parameter.requires_grad_(False)
    return model


def make_data(step: int, replica: int, *, count: int = 3, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    return [torch.randn(2, WIDTH, generator=generator, dtype=dtype) for _ in range(count)]


def loss_of(output: Tensor) -> Tensor:
    return (output * output).sum()


class Driver:
    """Runs scripts on one stage."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.adapter: DataParallel = adapt(module)
        self.deferral = Deferral(module)
        self.seen: dict[str, Any] = {}

    def step(self, script: str, data: list[Tensor], *, needs_input_grad: bool = True) -> list[Tensor | None]:
        """The input gradients of the microbatches."""
        inputs = [x.clone().requires_grad_(needs_input_grad) for x in data]
        outputs: dict[int, Tensor] = {}
        pending: dict[int, Pending] = {}
        split = "I" in script
        self.adapter.begin()
        try:
            words = iter(script.split())
            try:
                for word in words:
                    self._act(word, inputs, outputs, pending, split=split)
            except (ArithmeticError, ReplicaFailed):
                self._drain(words)
                raise
        finally:
            self.adapter.end()
        return [x.grad for x in inputs]

    def _drain(self, words: Iterator[str]) -> None:
        """After a failure: what the other replicas still wait for."""
        for word in words:
            match word:
                case "U":
                    self.adapter.unshard()
                case "R":
                    self.adapter.reshard()
                case "G":
                    self.adapter.reduce_grad(failed=True)

    def _act(
        self, word: str, inputs: list[Tensor], outputs: dict[int, Tensor], pending: dict[int, Pending], *, split: bool
    ) -> None:
        microbatch = int(word[1:] or 0)
        match word[0]:
            case "U":
                self.adapter.unshard()
            case "R":
                self.adapter.reshard()
            case "G":
                self.adapter.reduce_grad()
            case "F" if split:
                value, pending[microbatch] = run_deferred(self.deferral, self.module, (inputs[microbatch],), {})
                outputs[microbatch] = loss_of(value)
            case "F":
                outputs[microbatch] = loss_of(self.module(inputs[microbatch]))
            case "B":
                run_backward_full([outputs.pop(microbatch)], [None])
            case "I":
                backward_input([outputs.pop(microbatch)], [None], pending[microbatch], inputs=[inputs[microbatch]])
            case "W":
                backward_weight(pending.pop(microbatch))
            case "!":
                raise ArithmeticError("on purpose")


def plain_loop(model: nn.Module, steps: int, *, count: int = 3, dtype: torch.dtype = torch.float64) -> None:
    """The mean over the replicas of the sum over the microbatches, added up over the steps, in one process."""
    size = dist.get_world_size()
    for step in range(steps):
        for replica in range(size):
            for x in make_data(step, replica, count=count, dtype=dtype):
                (loss_of(model(x)) / size).backward()


def full(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if tensor is not None and hasattr(tensor, "full_tensor") else tensor


def differences(model: nn.Module, reference: nn.Module, *, limit: float = 1e-12) -> list[str]:
    """The parameters whose gradients differ: none, if all is well."""
    wrong = []
    expected = dict(reference.named_parameters())
    named = {name.replace("module.", ""): parameter for name, parameter in model.named_parameters()}
    if named.keys() != expected.keys():
        wrong.append(f"names: {sorted(named)} {sorted(expected)}")
    for name, parameter in named.items():
        got, want = full(parameter.grad), expected[name].grad
        if got is None or want is None:
            if got is not want:
                wrong.append(f"{name}: {got} instead of {want}")
        elif not (got.dtype is want.dtype and torch.allclose(got, want, rtol=limit, atol=limit)):
            wrong.append(f"{name}: off by {(got.to(want.dtype) - want).abs().max()} of {want.abs().max()}")
    return wrong


def compare(
    wrap: Callable[[nn.Module], nn.Module], script: str, *, steps: int = 1, frozen: bool = False, first: bool = False
) -> list[str]:
    """Steps of a wrapped stage against the plain loop over the data of all replicas."""
    model = freeze_some(make_model()) if frozen else make_model()
    reference = copy.deepcopy(model)
    driver = Driver(wrap(model))
    rank, size = dist.get_rank(), dist.get_world_size()
    wrong = []
    for step in range(steps):
        data = make_data(step, rank)
        grads = driver.step(script, data, needs_input_grad=not first)
        for x, grad in zip(data, grads, strict=True):
            lone = x.clone().requires_grad_()
            (want,) = torch.autograd.grad(loss_of(reference(lone)), lone)
            if first != (grad is None) or (grad is not None and not torch.allclose(grad, want, rtol=1e-12, atol=1e-12)):
                wrong.append(f"step {step}: input gradient {grad} instead of {want}")
    plain_loop(reference, steps)
    assert size == 2
    return wrong + differences(driver.module, reference)
