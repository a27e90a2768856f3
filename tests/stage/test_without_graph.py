"""Forwards that are run again are first run without a graph, but only where nobody could tell."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.errors import StageError
from penstock.stage.recompute import Repeats
from penstock.stage.without_graph import _MOST
from tests.parity.test_holding_less import state, train

WIDTH = 4


class Watched(nn.Module):
    """Notes of each forward whether there was a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)
        self.graphs: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.graphs.append(torch.is_grad_enabled())
        return self.compute(self.dropout(torch.tanh(self.linear(x))))

    def compute(self, x: Tensor) -> Tensor:
        return x


class AsksForGraph(Watched):
    def compute(self, x: Tensor) -> Tensor:
        return x if torch.is_grad_enabled() else 2 * x


class Draws(Watched):
    def compute(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            torch.rand(1)
        return x


class Warns(Watched):
    def compute(self, x: Tensor) -> Tensor:
        return checkpoint(torch.tanh, x, use_reentrant=True)  # type: ignore[no-any-return]


class Listens(Watched):
    def compute(self, x: Tensor) -> Tensor:
        x.register_hook(lambda grad: 2 * grad)
        return x


class Writes(Watched):
    """Without a graph, autograd lets it."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            x.mul_(2)
        return super().forward(x)


class LargeBuffer(Watched):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(1 << 19))


def hooked() -> Watched:
    module = Watched()
    module.linear.register_forward_hook(lambda *_: None)
    return module


def run(module: nn.Module, calls: int = 4, rows: Callable[[int], int] = lambda _: 3) -> list[bool]:
    """So many forwards, and then so many backwards; which of the forwards had a graph."""
    repeats = Repeats(module, calls, device=torch.device("cpu"), plain=True)
    given = [torch.randn(rows(m), WIDTH, requires_grad=True) for m in range(calls)]
    for microbatch, x in enumerate(given):
        output = repeats.first(microbatch, lambda args, kwargs: module(*args, **kwargs), (x,), {})
        assert output.requires_grad
        assert output.grad_fn is None
    graphs: Any = module.graphs
    found = list(graphs)
    for microbatch, x in enumerate(given):
        repeats.again(microbatch, lambda x=x: module(x)).sum().backward()  # type: ignore[misc]
        assert x.grad is not None
    return found


def test_a_captured_stage_goes_without_a_graph() -> None:
    """And with the user's own loss, which may do anything, it does not."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    pipe = penstock.pipeline(model, (torch.randn(2, WIDTH),), split_spec={"2": penstock.SplitPoint.BEGINNING})
    stage = pipe.get_stage_module(0)
    for loss, expected in ((None, [False, True, False, False]), (nn.functional.mse_loss, [True, True, True])):
        repeats = Repeats(stage, 3, device=torch.device("cpu"), plain=stage.only_operators)
        repeats.take_in(loss)
        graphs: list[bool] = []

        def call(args: tuple[Any, ...], kwargs: dict[str, Any], graphs: list[bool] = graphs) -> Any:
            graphs.append(torch.is_grad_enabled())
            return stage(*args, **kwargs)

        for microbatch in range(3):
            (output,) = repeats.first(microbatch, call, (torch.randn(2, WIDTH),), {})
            assert output.requires_grad
        assert graphs == expected


def test_the_first_call_is_made_both_ways_and_the_others_without_a_graph() -> None:
    assert run(Watched()) == [False, True, False, False, False]


@pytest.mark.parametrize("make", [AsksForGraph, Draws, Warns, Listens, Writes, LargeBuffer, hooked])
def test_the_graph_stays_where_something_would_differ(make: Callable[[], Watched]) -> None:
    assert run(make())[-3:] == [True, True, True]


def test_autocast_keeps_no_casts_without_a_graph() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert run(module := Watched()) == [True] * 4
    assert module.linear.weight.grad is not None


def test_a_trial_talks_to_nobody() -> None:
    """Other processes may not be making the same trial, and would wait for ever."""

    class Talks(Watched):
        def compute(self, x: Tensor) -> Tensor:
            told.append(torch.is_grad_enabled())
            dist.all_reduce(x.detach().clone())
            heard.append(torch.is_grad_enabled())
            return x

    told: list[bool] = []
    heard: list[bool] = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert run(Talks()) == [False, True, True, True, True]
    finally:
        dist.destroy_process_group()
    assert told == [False] + [True] * 8
    assert heard == [True] * 8


def test_only_so_many_kinds_of_calls_are_tried() -> None:
    graphs = run(Watched(), calls=_MOST + 3, rows=lambda m: m + 1)
    assert graphs == [False, True] * _MOST + [True] * 3


def test_an_input_that_is_changed_now_and_then_is_refused() -> None:
    """As autograd refuses it where there is a graph."""

    class NowAndThen(Watched):
        def compute(self, x: Tensor) -> Tensor:
            if len(self.graphs) > 3:
                self.given.mul_(2)
            return x

        def forward(self, x: Tensor) -> Tensor:
            self.given = x
            return super().forward(x)

    with pytest.raises(StageError, match="changed an input that requires a gradient in place"):
        run(NowAndThen())


@pytest.mark.parametrize("make", [Watched, AsksForGraph, Draws, Listens])
@pytest.mark.parametrize("schedule", ["gpipe", "zbv"])
def test_the_training_is_the_same_to_the_bit(make: type[Watched], schedule: str) -> None:
    def trained(**options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        modules: list[nn.Module] = [make() for _ in range(2 if schedule == "gpipe" else 4)]
        losses = train(modules, torch.randn(8, WIDTH), schedule=schedule, **options)
        return [tensor for tensor in losses + state(modules) if tensor is not None]

    with warnings.catch_warnings(action="error"):
        torch.testing.assert_close(trained(recompute=True), trained(), rtol=0, atol=0)
