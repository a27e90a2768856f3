"""Kinds of blocks: modules from [rows, length, WIDTH] to the same, each with something that a pipeline must get right.

    @block("batch", "state")
    class Batchnorm(nn.Module): ...

    KINDS["batchnorm"].traits       # frozenset({"batch", "state"})

A kind is named as its class in small letters. Its traits say what a case must heed:

- "tokens": takes whole numbers [rows, length], so it can only come first; "head": gives WORDS numbers, so it can only come last;
- "random": draws from torch's random numbers; "batch": what it does to a row depends on the other rows of its microbatch;
- "state": changes buffers; "python": keeps state that is no buffer; "generator": draws random numbers of its own;
- "data": branches on values, "tensor hook": hooks into tensors, so that it cannot be captured;
- "some": some parameters take part in some microbatches only; "unused": some never do; "sparse": sparse gradients;
- "strides": gives what is not contiguous; "in place": writes to the output of a linear layer;
- "wide": saves more than offloading leaves alone; "half": computes in a smaller type; "slow": takes long to build;
- "reads": takes `scale`, a second argument of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 4
WORDS = 11


@dataclass(frozen=True)
class Kind:
    """One kind of block."""

    make: Callable[[], nn.Module]
    traits: frozenset[str]


KINDS: dict[str, Kind] = {}


def block(*traits: str) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Put a class into the table."""

    def put(kind: type[nn.Module]) -> type[nn.Module]:
        KINDS[kind.__name__.lower()] = Kind(kind, frozenset(traits))
        return kind

    return put


class WithLinear(nn.Module):
    """A block around one linear layer, whose weight can be tied to that of another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


# -- what models are mostly made of


@block()
class Linear(WithLinear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


@block()
class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x)))


@block()
class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


@block()
class Layernorm(WithLinear):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


@block()
class Rmsnorm(WithLinear):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


@block("strides")
class Groupnorm(WithLinear):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2)


@block("batch", "state", "strides")
class Batchnorm(WithLinear):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2)


@block("strides")
class Instancenorm(WithLinear):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2)


@block()
class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


@block()
class Multihead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


@block()
class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@block("strides")
class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)


@block()
class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


@block()
class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x - self.gru(x)[0]


@block("wide")
class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 512), nn.Linear(512, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


@block("tokens")
class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


@block("tokens", "sparse")
class Sparseembed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


@block("head")
class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


# -- shapes, views, writes in place


@block("in place")
class Inplace(WithLinear):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y.mul_(0.5)
        y[:, 0].add_(1.0)
        return y.relu_() + x


@block("in place")
class Inplaceinput(WithLinear):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x * 1.0)
        return y.add_(x).clamp_(-2.0, 2.0)


@block("strides")
class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).view(*x.shape[:-1], 2, WIDTH)[..., 1, :]


@block("strides")
class Strided(WithLinear):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).transpose(1, 2).contiguous().transpose(1, 2)


@block()
class Same(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


@block()
class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x) + x.mean(1, keepdim=True)


@block()
class Sorted(WithLinear):
    def forward(self, x: Tensor) -> Tensor:
        values, places = self.linear(x).sort(dim=-1)
        return values.cumsum(-1) * 0.3 + x.gather(-1, places)


@block()
class Padded(WithLinear):
    def forward(self, x: Tensor) -> Tensor:
        return functional.pad(self.linear(x), (0, 0, 1, 0))[:, :-1] + x.roll(1, dims=-1)


@block()
class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, WIDTH, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("rlw,kwv->rlv", x, self.weight).tanh()


@block()
class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x, x.tanh()).tanh()


@block("reads")
class Scaled(WithLinear):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.linear(x) * scale[:, None, None]


@block("batch sizes")
class Bysize(WithLinear):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (0.5 if x.shape[0] > 1 else 0.75)


# -- parameters


@block()
class Twice(WithLinear):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        return torch.tanh(self.linear(y)) + y @ self.linear.weight


@block("scalar")
class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.shift


@block("unused")
class Unused(WithLinear):
    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@block()
class Adapter(WithLinear):
    """A frozen layer with a small one beside it that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.1 * self.linear(x)


@block()
class Weightnorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()


@block("state", "spectral")
class Spectralnorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()


@block()
class Experts(nn.Module):
    """All experts see all rows, weighed by a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.weights = nn.Parameter(torch.randn(3, WIDTH, WIDTH) * 0.4)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        return torch.einsum("rle,rlw,ewv->rlv", shares, x, self.weights)


@block("routed", "some")
class Routed(nn.Module):
    """Each place goes to one expert, found by torch.where."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            (places,) = torch.where((flat[:, 0] > 0) == bool(number))
            out = out.index_add(0, places, expert(flat[places]))
        return out.unflatten(0, x.shape[:2])


@block("data", "some")
class Branch(nn.Module):
    """Which layer is used depends on the values of the microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.high, self.low = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.high(x) if float(x[0, 0, 0]) > 0 else self.low(x)


@block("data", "some", "outside")
class Outside(WithLinear):
    """The weight of a linear layer is used beside it, on some microbatches only."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y + self.linear.weight.sum() * 0.01 if float(x[0, 0, 0].detach()) > 0 else y


# -- functions with a backward of their own, regions, types


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3 * 0.1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * x.square() * 0.3


@block()
class Custom(WithLinear):
    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(self.linear(x))


@block("checkpoint")
class Checkpointed(WithLinear):
    def run(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * x

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False)


def _weighted(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.tanh(functional.linear(x, weight, bias))


@block("checkpoint")
class Checkpointedweights(WithLinear):
    """The weights are arguments of what is checkpointed."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(_weighted, x, self.linear.weight, self.linear.bias, use_reentrant=False)


@block("half")
class Half(WithLinear):
    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.linear.weight.bfloat16(), self.linear.bias.bfloat16()
        return functional.linear(x.bfloat16(), weight, bias).to(x.dtype).tanh()


@block("half")
class Single(WithLinear):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x.float(), self.linear.weight.float(), self.linear.bias.float()).to(x.dtype)


@block("half", "autocast")
class Autocast(WithLinear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = functional.linear(x.float(), self.linear.weight.float(), self.linear.bias.float())
        return y.to(x.dtype).tanh()


@block("complex")
class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x, norm="ortho") * self.filter, n=WIDTH, norm="ortho")


@block("complex")
class Conjugate(WithLinear):
    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(self.linear(x).unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(turned.conj().resolve_conj() * turned.exp()).flatten(-2).tanh()


@block("batch")
class Detached(WithLinear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            size = x.abs().mean()
        return self.linear(x) + x.detach() * size


@block("data", "differentiates")
class Differentiates(WithLinear):
    """Its output holds the gradient of something with respect to its input."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.linear(inner).square().sum()
            (slope,) = torch.autograd.grad(energy, inner, create_graph=True)
        return x - 0.1 * slope if torch.is_grad_enabled() else (x - 0.1 * slope).detach()


@block("func")
class Functional(WithLinear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: torch.tanh(self.linear(row)))(x)
