"""Forwards that are run twice, of modules that keep more than buffers: each tells what a differential attack measured."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.regressions.plain_loop import WIDTH, batch, difference, looped, trained

# torch.compile looks at `.grad` of what a stage was given
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
EXACT = 1e-12


class Hooked(nn.Module):
    """Its forward uses what a hook on its first layer has set."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.kept = 1.0, torch.zeros((), dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(self.first(x))) * self.scale + self.kept.mean()


def number_after(stage: Hooked) -> None:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        stage.scale = float(output.detach().abs().mean())

    stage.first.register_forward_hook(hook)


def number_before(stage: Hooked) -> None:
    def hook(module: nn.Module, args: Any) -> None:
        stage.scale = float(args[0].detach().abs().mean())

    stage.first.register_forward_pre_hook(hook)


def input_after(stage: Hooked) -> None:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        stage.kept = args[0]

    stage.first.register_forward_hook(hook)


def input_before(stage: Hooked) -> None:
    def hook(module: nn.Module, args: Any) -> None:
        stage.kept = args[0]

    stage.first.register_forward_pre_hook(hook)


def hooked(register: Callable[[Hooked], None]) -> list[nn.Module]:
    torch.manual_seed(0)
    stages = [Hooked().double() for _ in range(2)]
    for stage in stages:
        register(stage)
    return [*stages]


@pytest.mark.parametrize(
    "register", [number_after, number_before, input_after, input_before], ids=lambda it: it.__name__
)
def test_a_hook_that_sets_what_the_forward_uses_is_called_again(register: Callable[[Hooked], None]) -> None:
    """A forward hook or pre-hook that sets a Python number, or keeps its input, counted as one that looks on, and was left out of
    the second run: the forward then used the value of another microbatch. Gradients were off by up to 0.61."""
    found = trained(hooked(register), batch(), schedule="gpipe", recompute=True)
    assert difference(found, looped(hooked(register), batch())) < EXACT


class Plain(nn.Module):
    """Two layers; those derived from it multiply what is between them with a number that differs from call to call."""

    says = ""  # what a warning about it must name

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def factor(self) -> Any:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) * self.factor())


class Counter(Plain):
    says = "calls"

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def factor(self) -> float:
        self.calls += 1
        return 1 + 0.1 * self.calls


class Listed(Plain):
    says = "seen"

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def factor(self) -> float:
        self.seen.append(1)
        return 1 + 0.1 * len(self.seen)


class PlainTensor(Plain):
    says = "calls"

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros((), dtype=torch.float64)  # no buffer

    def factor(self) -> float:
        self.calls += 1
        return 1 + 0.1 * self.calls.item()


class OwnGenerator(Plain):
    says = "generator"

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def factor(self) -> Tensor:
        return 1 + torch.rand((), generator=self.generator, dtype=torch.float64)


class PythonRandom(Plain):
    says = "random"

    def factor(self) -> float:
        return 1 + random.random()


class NumpyRandom(Plain):
    says = "random"

    def factor(self) -> float:
        return 1 + float(np.random.rand())  # the global state, as most code has it


STATES = (Counter, Listed, PlainTensor, OwnGenerator, PythonRandom, NumpyRandom)


def changes_its_input(kind: type[Plain]) -> type[Plain]:
    """Autograd refuses that for what was received from another stage, after the state has been touched."""

    class InPlace(kind):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor) -> Tensor:
            factor = self.factor()
            x.mul_(1.5)
            return self.second(torch.tanh(self.first(x)) * factor)

    return InPlace


def differentiates(kind: type[Plain]) -> type[Plain]:
    """A split backward finds out while the forward runs."""

    class Forces(kind):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor) -> Tensor:
            energy = super().forward(x)
            (forces,) = torch.autograd.grad(energy.square().sum(), x, create_graph=True)
            return forces

    return Forces


def compiles_a_part(kind: type[Plain]) -> type[Plain]:
    """Compiled parts are looked for in a run without data, before the first microbatch."""

    class Compiled(kind):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.third = torch.compile(nn.Linear(WIDTH, WIDTH), backend="aot_eager")

        def forward(self, x: Tensor) -> Tensor:
            return self.third(super().forward(x))

    return Compiled


def stages(kind: type[Plain]) -> list[nn.Module]:
    """The state is that of the second stage, whose input requires a gradient."""
    torch.compiler.reset()
    torch.manual_seed(0)
    random.seed(5)
    np.random.seed(5)
    return [Plain().double(), kind().double()]


Change = Callable[[type[Plain]], type[Plain]]
_FAILS = pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="a forward that penstock runs twice touches state that is no buffer twice",
)
CASES = [  # `Plain`, which keeps nothing, shows that all else is right
    *((changes_its_input, "1f1b", kind, False) for kind in (Plain, *STATES)),
    *((differentiates, "zb-h1", kind, kind is not Plain) for kind in (Plain, *STATES)),
    *((compiles_a_part, "1f1b", kind, False) for kind in (Plain, *STATES)),
]


@pytest.mark.parametrize(
    ("change", "schedule", "kind"),
    [
        pytest.param(*case, marks=[_FAILS] if fails else [], id=f"{case[0].__name__}-{case[2].__name__}")
        for *case, fails in CASES
    ],
)
def test_a_forward_nobody_asked_to_repeat_runs_once(change: Change, schedule: str, kind: type[Plain]) -> None:
    """An input that is changed in place, differentiation inside a stage of a split plan, and the look at compiled parts each ran
    a forward a second time. Counters, lists, plain tensors, generators, and the random numbers of Python and numpy went on from
    where the first run had left them: losses and gradients were off by 0.03 to 1.08."""
    found = trained(stages(change(kind)), batch(), schedule=schedule)
    assert difference(found, looped(stages(change(kind)), batch())) < EXACT


@pytest.mark.parametrize("kind", STATES, ids=lambda kind: kind.__name__)
def test_recompute_is_right_or_names_what_changed(kind: type[Plain]) -> None:
    """Recompute puts back buffers and torch's random numbers. All else that a forward changes was used as the last forward had
    left it, without a word: gradients were off by 0.04 here. It need not be put back, but it is found, and named once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = trained(stages(kind), batch(), schedule="gpipe", recompute=True)
    said = [str(one.message) for one in caught if kind.says in str(one.message)]
    assert difference(found, looped(stages(kind), batch())) < EXACT or len(said) == 1
