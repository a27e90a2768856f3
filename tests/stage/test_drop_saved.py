"""Forwards that are run again hold nothing the first time, but only where nobody needs it; and no forward can tell."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.errors import StageError
from penstock.stage.recompute import Repeats
from tests.parity.test_holding_less import state, train

WIDTH, LAYERS, CALLS = 4, 3, 4


class Watched(nn.Module):
    """Notes of each forward how many of its layers' outputs are held when it ends, besides the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.dropout = nn.Dropout(0.3)
        self.held: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        assert torch.is_grad_enabled()
        storages = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            storages.append(weakref.ref(x.untyped_storage()))
        self.held.append(sum(one() is not None for one in storages) - 1)
        return self.compute(self.dropout(x))

    def compute(self, x: Tensor) -> Tensor:
        return x


class Differentiates(Watched):
    def compute(self, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad((x**2).sum(), x, create_graph=True)
        return x + slope


class TorchFunc(Watched):
    def compute(self, x: Tensor) -> Tensor:
        return x + torch.func.grad(lambda x: (x**2).sum())(x)


class Keeps(Watched):
    def compute(self, x: Tensor) -> Tensor:
        self.value = 2 * x
        return x


class Checkpoints(Watched):
    def compute(self, x: Tensor) -> Tensor:
        return checkpoint(torch.tanh, x, use_reentrant=False)  # type: ignore[no-any-return]


class LargeBuffer(Watched):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(1 << 19))


class Listens(Watched):
    def compute(self, x: Tensor) -> Tensor:
        x.register_hook(lambda grad: 2 * grad)
        return x


class OwnBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.exp()


class OwnFunction(Watched):
    def compute(self, x: Tensor) -> Tensor:
        return OwnBackward.apply(x)  # type: ignore[no-any-return,no-untyped-call]


class NowAndThen(Watched):
    """Differentiates in the third forward."""

    def compute(self, x: Tensor) -> Tensor:
        if len(self.held) == 3:
            torch.autograd.grad((x**2).sum(), x, retain_graph=True)
        return x


def run(module: Any) -> list[int]:
    """So many forwards, and then so many backwards; what the forwards held."""
    repeats = Repeats(module, CALLS, device=torch.device("cpu"))
    given = [torch.randn(3, WIDTH, requires_grad=True) for _ in range(CALLS)]
    for microbatch, x in enumerate(given):
        output = repeats.first(microbatch, lambda args, kwargs: module(*args, **kwargs), ((x,), {}))
        assert output.requires_grad
        assert output.grad_fn is None
    found = list(module.held)
    for microbatch, x in enumerate(given):
        repeats.again(microbatch, lambda x=x: module(x)).sum().backward()  # type: ignore[misc]
        assert x.grad is not None
    assert module.held[len(found) :] == [LAYERS - 1] * CALLS
    return found


@pytest.mark.parametrize("make", [Watched, Listens, OwnFunction])
def test_all_forwards_but_the_first_hold_nothing(make: type[Watched]) -> None:
    """And none is made beside the two for each microbatch: whoever counts them sees as many."""
    assert run(make()) == [LAYERS - 1, 0, 0, 0]


def test_nor_do_they_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert run(Watched())[1:] == [0, 0, 0]


@pytest.mark.parametrize("make", [Differentiates, TorchFunc, Keeps, LargeBuffer])
def test_what_is_needed_is_held(make: Callable[[], Watched]) -> None:
    assert run(make())[-3:] == [LAYERS - 1] * 3


def test_each_mode_is_looked_at() -> None:
    """Batch norms that are frozen later, and dropout that is switched off, are other forwards."""
    module: Any = Watched()
    repeats = Repeats(module, 6, device=torch.device("cpu"))
    for microbatch, training in enumerate([True, True, False, False, True, False]):
        module.dropout.train(training)
        repeats.first(microbatch, lambda args, _: module(*args), ((torch.ones(3, WIDTH),), {}))
    assert module.held == [2, 0, 2, 0, 0, 0]


def test_a_captured_stage_holds_nothing_and_says_so_if_it_is_differentiated() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    pipe = penstock.pipeline(model, (torch.randn(2, WIDTH),), split_spec={"2": penstock.SplitPoint.BEGINNING})
    stage, calls = pipe.get_stage_module(0), list[None]()
    repeats = Repeats(stage, 2, device=torch.device("cpu"))
    repeats.begin(nn.MSELoss())

    def call(args: Any, kwargs: Any) -> Any:
        output = stage(*args, **kwargs)
        calls.append(None)
        if len(calls) == 2:
            with pytest.raises(StageError, match="what a forward saved is needed"):
                output[0].sum().backward()
        return output

    for microbatch in range(2):
        (output,) = repeats.first(microbatch, call, ((torch.randn(2, WIDTH),), {}))
        assert output.requires_grad


def test_one_that_needs_it_later_is_told_and_from_then_on_all_is_kept() -> None:
    module: Any = NowAndThen()
    repeats = Repeats(module, 1, device=torch.device("cpu"))

    def first() -> None:
        repeats.first(0, lambda args, _: module(*args), ((torch.ones(3, WIDTH),), {}))

    first()
    first()
    with pytest.raises(StageError, match=r"what a forward saved is needed .* From the next step on it is kept"):
        first()
    first()
    assert module.held == [2, 0, 0, 2]


@pytest.mark.parametrize("make", [Watched, Differentiates, TorchFunc, Keeps, Checkpoints, Listens, OwnFunction])
@pytest.mark.parametrize("schedule", ["gpipe", "zbv"])
def test_the_training_is_the_same_to_the_bit(make: type[Watched], schedule: str) -> None:
    def trained(**options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        modules: list[nn.Module] = [make() for _ in range(2 if schedule == "gpipe" else 4)]
        losses = train(modules, torch.randn(8, WIDTH), schedule=schedule, **options)
        return [tensor for tensor in losses + state(modules) if tensor is not None]

    with warnings.catch_warnings(action="error"):
        torch.testing.assert_close(trained(recompute=True), trained(), rtol=0, atol=0)
