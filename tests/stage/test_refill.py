"""R fills the graph of F and ends there, where that is exact; otherwise it runs to the end. No training can tell."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.errors import PenstockError, StageError
from penstock.stage.refill import Refill
from tests.parity.test_holding_less import state, train

WIDTH, MICROBATCHES, STEPS = 4, 4, 4
RERUNS = STEPS * MICROBATCHES


class Counted(nn.Module):
    """Counts, of all stages of its kind, the forwards that begin, and those that come to an end."""

    begun, ended = 0, 0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.inside = False
        self.change()

    def change(self) -> None:
        """What a kind has besides."""

    def forward(self, x: Tensor) -> Tensor:
        type(self).begun += 1
        self.inside = True
        output = x + self.last(self.compute(torch.tanh(self.norm(self.first(x)))))
        self.inside = False
        type(self).ended += 1
        return output

    def compute(self, x: Tensor) -> Tensor:
        return self.dropout(x)  # type: ignore[no-any-return]


class InPlace(Counted):
    def compute(self, x: Tensor) -> Tensor:
        return (x + 1).add_(self.dropout(x)).relu_()


class Autocast(Counted):
    def compute(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.first(super().compute(x)).float()  # type: ignore[no-any-return]


class Catches(Counted):
    """Handles errors of what it calls."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x)
        except Exception:  # noqa: BLE001 - that is what users write
            return x


class Translates(Counted):
    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x)
        except BaseException as error:
            raise ValueError("no forward") from error


class Listens(Counted):
    def compute(self, x: Tensor) -> Tensor:
        x.register_hook(lambda grad: 2 * grad)
        return super().compute(x)


class Scaled(Counted):
    def change(self) -> None:
        self.first.register_forward_hook(lambda module, args, output: 2 * output.sigmoid())


class Frozen(Counted):
    def change(self) -> None:
        self.requires_grad_(False)
        self.norm.eval()


STOPPED = [Counted, InPlace, Autocast, Catches, Translates, Listens, Scaled]


class Counter(Counted):
    """Sets an attribute, on which the next forward may depend."""

    calls = 0

    def compute(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().compute(x)


class OwnBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.held = x.exp()  # past autograd
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.held  # type: ignore[no-any-return]


class OwnFunction(Counted):
    def compute(self, x: Tensor) -> Tensor:
        return OwnBackward.apply(super().compute(x))  # type: ignore[no-any-return,no-untyped-call]


class Checkpoints(Counted):
    def compute(self, x: Tensor) -> Tensor:
        return checkpoint(super().compute, x, use_reentrant=False)  # type: ignore[no-any-return]


class OnHost(Counted):
    def compute(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().compute(x).exp()


class Keeps(Counted):
    """Somebody wants the gradient of a value before which nothing was saved."""

    def change(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.kept["x"] = x = x + self.first.bias
        x.retain_grad()
        return super().forward(x)


class AtTheEnd(Counted):
    def change(self) -> None:
        self.register_forward_hook(lambda *_: None, always_call=True)


class Looks(Counted):
    """A hook that only looks on saves something, in some forwards."""

    def change(self) -> None:
        def look(module: nn.Module, args: Any, output: Tensor) -> None:
            if type(self).begun % 2:
                (output * output).sum()

        self.first.register_forward_hook(look)


WHOLE = [Counter, OwnFunction, Checkpoints, OnHost, Keeps, AtTheEnd]


def trained(make: type[Counted], **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    make.begun = make.ended = 0
    modules: list[nn.Module] = [make(), make()]
    losses = train(modules, torch.randn(8, WIDTH), schedule="gpipe", steps=STEPS, **options)
    assert all(module.inside is False for module in modules)
    kept = [module.kept["x"].grad for module in modules if isinstance(module, Keeps)]
    return [*losses, *state(modules), *kept]  # type: ignore[list-item]


@pytest.mark.parametrize("make", [*STOPPED, *WHOLE, Looks])
def test_the_training_is_the_same_to_the_bit_and_only_what_may_stops(make: type[Counted]) -> None:
    with warnings.catch_warnings(action="error"):
        expected = trained(make)
        found = trained(make, recompute=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert make.begun == 2 * 2 * RERUNS
    left = make.begun - make.ended
    later = RERUNS - MICROBATCHES  # all but those of the first step; and a loss wants the last stage to come to its end
    if make is Looks:  # those whose hook saved nothing
        assert 0 < left < later
    else:
        assert left == (later if make in STOPPED else 0)


def test_a_stage_that_trains_nothing_is_not_run_again() -> None:
    Frozen.begun = 0
    train([Frozen(), Counted()], torch.randn(8, WIDTH), schedule="gpipe", steps=STEPS, recompute=True)
    assert Frozen.begun == RERUNS + MICROBATCHES  # but in the first step


# -- what a second run must do


class Whim(nn.Module):
    """Saves something else, more or less in its twelfth call: the second run of a later step's microbatch."""

    calls = 0

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(WIDTH, WIDTH), change

    def forward(self, x: Tensor) -> Tensor:
        Whim.calls += 1
        x = torch.tanh(self.layer(x))
        return self.layer(self.change(x) if Whim.calls == 14 else x.exp())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.detach(), r"saved 5 tensors for its backward, and when it was run again \d"),
        (lambda x: x.repeat(2, 1).exp()[:2], r"saved float32\[2, 4\] as number \d .* run again float32\[4, 4\]"),
    ],
    ids=["fewer", "larger"],
)
def test_another_number_or_shape_is_told(change: Callable[[Tensor], Tensor], message: str) -> None:
    Whim.calls = 0
    with pytest.raises(PenstockError, match=message):
        train([Whim(change), nn.Linear(WIDTH, WIDTH)], torch.randn(8, WIDTH), schedule="gpipe", steps=2, recompute=[0])


@contextmanager
def first(refill: Refill) -> Iterator[None]:
    with torch.autograd.graph.saved_tensors_hooks(refill.pack, refill.unpack):
        yield


def needed() -> Any:
    raise StageError("too early")


def test_what_is_filled_in_goes_with_the_backward() -> None:
    refill, x = Refill(needed), torch.randn(3, requires_grad=True)

    def run() -> Tensor:
        made.append(x.exp().sin())
        return made.pop()

    made: list[Tensor] = []
    with first(refill):
        output = run()
    with pytest.raises(StageError, match="too early"):
        output.sum().backward(retain_graph=True)
    places = list(refill.places)
    refill.fill(run)
    assert [place().tensor is not None for place in places] == [True, True]  # type: ignore[union-attr]
    output.sum().backward()
    assert [place() for place in places] == [None, None]
    assert x.grad is not None
    torch.testing.assert_close(x.grad, x.exp() * x.exp().cos())


def test_what_was_changed_in_place_after_it_was_filled_in_is_refused() -> None:
    """As autograd does without hooks."""
    refill, x = Refill(needed), torch.randn(4, requires_grad=True)

    def run() -> Tensor:
        y = x.exp()
        output = y.sin()
        y.mul_(2)
        return output.exp()

    with first(refill):
        output = run()
    refill.fill(run)
    with pytest.raises(StageError, match=r"of shape \[4\] that a forward saved for its backward was changed in place"):
        output.sum().backward()


def test_an_error_of_the_second_run_is_raised() -> None:
    refill, x = Refill(needed), torch.randn(4, requires_grad=True)
    with first(refill):
        output = x.exp()
    with pytest.raises(ZeroDivisionError):
        refill.fill(lambda: 1 / 0)
    assert output.requires_grad
