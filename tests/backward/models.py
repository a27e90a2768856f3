"""Stages for the grid of combinations: each does something that a backward, a second forward or moved tensors may get wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 4


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Deep(nn.Sequential):
    """Layers of one size."""

    def __init__(self) -> None:
        super().__init__(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.batch = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.batch(self.norm(self.layer(x)))


class Dropped(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1).expand(-1, 3, -1)
        return self.attention(x, x, x, need_weights=False)[0].mean(1)


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.layer = nn.Conv1d(1, 2, 3, padding=1), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.convolution(x.unsqueeze(1)).flatten(1))


class SharedLayer(Mlp):
    """One layer is called twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class SharedWeight(nn.Module):
    """Two layers have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class TiedEmbedding(nn.Module):
    """The weight of a head is that of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.table(x.detach().argmax(-1)))


class UsedElsewhere(Mlp):
    """A weight of a layer is used by another operator as well."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.second.weight.sum(1)


class UsedElsewhereSometimes(Mlp):
    """The same, in every second call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        value = super().forward(x)
        return value + self.second.weight.sum(1) if self.calls % 2 == 0 else value


class Frozen(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight.requires_grad_(False)


class FrozenBias(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.first.bias.requires_grad_(False)


class Unused(Mlp):
    """A layer takes no part, so that its parameters have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.spare(x)
        return super().forward(x)


class Addmm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.addmm(self.bias, x, self.weight))


class Checkpointed(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return made


class CheckpointedReentrant(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(super().forward, x * self.scale, use_reentrant=True)
        return made


class CheckpointedWeights(Mlp):
    """The weights are arguments of what is checkpointed, as in captured models."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(self.body, x, *self.parameters(), use_reentrant=False)
        return made

    def body(self, x: Tensor, weight: Tensor, bias: Tensor, second: Tensor) -> Tensor:
        return x + F.linear(torch.tanh(F.linear(x, weight, bias)), second)


class CheckpointedNested(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(self.outer, x, use_reentrant=False)
        return made

    def outer(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(super().forward, torch.tanh(x), use_reentrant=False)
        return made


class SavedOnHost(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().forward(x)


class InPlaceInput(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(1.5))


class InPlaceOutput(Mlp):
    """Writes to the outputs of its layers, and to a view of one."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.unsqueeze(1))
        hidden[..., :2].mul_(2.0)
        return self.second(torch.tanh(hidden)).add_(x.unsqueeze(1)).squeeze(1)


class Forces(Mlp):
    """Differentiates inside its forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            place = x if x.requires_grad else x.detach().requires_grad_()
            (forces,) = torch.autograd.grad(super().forward(place).square().sum(), place, create_graph=True)
        return x + forces


class Transformed(Mlp):
    """Calls its layers inside torch.func."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(super().forward)(x)


class Counter(Mlp):
    """Its result depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, [0]
        self.total = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.total += 1
        return super().forward(x) * (1 + 0.1 * self.calls + 0.01 * len(self.seen) + 0.001 * self.total.item())


class Drawn(Mlp):
    """Random numbers of Python, of numpy and of a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        own = torch.rand((), generator=self.generator, dtype=x.dtype)
        return super().forward(x) * (1 + own + random.random() + np.random.rand())


class HookSets(Mlp):
    """A hook sets a number that the forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.first.register_forward_hook(self.note)

    def note(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.scale = float(output.detach().abs().mean())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class HookActs(Mlp):
    """Hooks change gradients, of tensors and of a module's output."""

    def __init__(self) -> None:
        super().__init__()
        self.second.register_full_backward_hook(lambda module, given, made: (given[0] * 2,))
        self.second.register_forward_hook(self.tripled)

    def tripled(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if output.requires_grad:
            output.register_hook(lambda grad: grad * 3)
        return output + 1


class Sliced(Mlp):
    """Its layers read views with other strides, and no rows or one."""

    def forward(self, x: Tensor) -> Tensor:
        turned = super().forward(x.t().contiguous().t())
        return turned + super().forward(x[:1]) + super().forward(x[:0]).sum()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x.unsqueeze(1).expand(-1, 2, -1))[0][:, -1]


class Regularized(Mlp):
    """A parameter that is no weight of a layer, and one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + (self.first.weight**2).sum()


class Autocast(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x.float()).to(x.dtype)


MODELS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind
    for kind in (
        *(Mlp, Deep, Normed, Dropped, Attention, Convolved, SharedLayer, SharedWeight, TiedEmbedding, UsedElsewhere),
        *(UsedElsewhereSometimes, Frozen, FrozenBias, Unused, Addmm, Checkpointed, CheckpointedReentrant),
        *(CheckpointedWeights, CheckpointedNested, SavedOnHost, InPlaceInput, InPlaceOutput, Forces, Transformed),
        *(Counter, Drawn, HookSets, HookActs, Sliced, Recurrent, Regularized),
    )
}
