"""More kinds of blocks: random numbers, state, hooks, parts that are compiled."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.fuzz.blocks import WIDTH, WithLinear, block

# -- random numbers


@block("random")
class Dropout(WithLinear):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(self.linear(x), 0.3, self.training) + x


@block("random")
class Dropouts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.AlphaDropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.up(self.first(x))))


@block("random")
class Noise(WithLinear):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y + 0.1 * torch.randn_like(y) if self.training else y


@block("generator", "python")
class Owngenerator(WithLinear):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.linear(x)
        return self.linear(x) * torch.rand(WIDTH, generator=self.generator, dtype=x.dtype)


@block("generator", "python")
class Pythonrandom(WithLinear):
    def __init__(self) -> None:
        super().__init__()
        self.dice = random.Random(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (self.dice.random() if self.training else 0.5)


# -- state


@block("state")
class Counted(WithLinear):
    """A buffer that each forward changes and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return self.linear(x) / (1 + self.seen)


@block("state")
class Running(WithLinear):
    """A running mean of what passes, taken off before it is changed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) - self.mean
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(y.flatten(0, 1).mean(0), 0.2)
        return y


@block("python")
class Calls(WithLinear):
    """A number of Python's that each forward changes and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.linear(x) / (1 + self.calls)


@block("python")
class Remembers(WithLinear):
    """A list of plain tensors, the last of which the next forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.seen:
            y = y + self.seen[-1]
        if self.training:
            self.seen.append(x.detach().mean((0, 1)))
        return y


# -- hooks


def _half_more(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 1.5


def _shifted(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0] + 0.25,)


@block("hooks")
class Hooked(WithLinear):
    """Hooks that take part in what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.register_forward_hook(_half_more)
        self.linear.register_forward_pre_hook(_shifted)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def _note_size(module: nn.Module, args: tuple[Tensor]) -> None:
    module.size = float(args[0].detach().abs().mean())


@block("hooks", "python", "notes")
class Hooknotes(WithLinear):
    """A hook that sets a number which forward then uses."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0.0
        self.register_forward_pre_hook(_note_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (1 + self.size)


def _clamped(grad: Tensor) -> Tensor:
    return grad * 0.5


@block("tensor hook", "hooks")
class Tensorhook(WithLinear):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(_clamped)
        return torch.tanh(y)


@block("tensor hook", "hooks")
class Backwardhook(WithLinear):
    def __init__(self) -> None:
        super().__init__()
        self.linear.register_full_backward_hook(_scaled_back)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def _scaled_back(module: nn.Module, given: Any, out: Any) -> Any:
    return tuple(None if grad is None else grad * 0.75 for grad in given)


@block("hooks", "parameter hook")
class Parameterhook(WithLinear):
    """A hook on a parameter, which changes its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.hook_on_weight()

    def hook_on_weight(self) -> None:
        self.linear.weight.register_hook(_clamped)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.linear(x))


# -- compiled parts


@block("slow", "compiled")
class Compiled(WithLinear):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.inner.compile(backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.linear(x)


@block("slow", "compiled")
class Compiledfunction(WithLinear):
    def __init__(self) -> None:
        super().__init__()
        self.mixed = torch.compile(_mixed, backend="aot_eager", dynamic=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(self.linear(x), x)


def _mixed(y: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(y) * 0.5 + x
