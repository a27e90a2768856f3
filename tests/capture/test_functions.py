"""Gradients that are the model's own: autograd functions keep their backward, hooks that would be lost are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from penstock.capture import pipe_split, pipeline
from penstock.comm.local import LocalWorld
from penstock.errors import CaptureError
from penstock.run.schedule import Schedule
from penstock.schedules import get_schedule
from tests.capture.chain import assert_same, assert_same_grads, forward_backward
from tests.capture.test_stage_module import _saved_and_loaded


class Rounded(Function):
    """Rounds, and lets a scaled gradient through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.scale, None


class Reversed(Function):
    """Returns what it is given; the gradient turns round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -grads[0]


class Pair(Function):
    """Two results, two tensors, the new style of a function; the gradients are those of no formula."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * y, x + y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return grads[0] * x, grads[1] * y


class Own(nn.Module):
    """Functions in both stages, one result crosses, one call stands inside autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, z = Pair.apply(self.a(x), x)
        y = Reversed.apply(Rounded.apply(y, 3.0))
        pipe_split()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = Rounded.apply(self.b(y), 0.5) + z
        return checkpoint(lambda v: Rounded.apply(v.float(), 2.0).sin(), z, use_reentrant=False)


def test_a_backward_of_its_own_is_kept() -> None:
    torch.manual_seed(0)
    model, x = Own(), torch.randn(3, 4)
    reference = copy.deepcopy(model)
    pipe = pipeline(model, (x,))
    assert "Pair_apply" in pipe.get_stage_module(0).print_readable()
    for size in (1, 3, 5):
        x = torch.randn(size, 4)
        expected = reference(x)
        assert_same(forward_backward(pipe, (x,), {}, lambda out: out.square().sum()), expected)
        expected.square().sum().backward()
        assert_same_grads(model, reference)
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    for made in (_saved_and_loaded(pipe), copy.deepcopy(pipe)):
        made.eval()
        assert_same(made(x), reference.eval()(x))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_under_a_schedule(schedule: str) -> None:
    torch.manual_seed(0)
    model, x = Own(), torch.randn(6, 4)
    reference = copy.deepcopy(model)
    pipe = pipeline(model, (x[:2],))

    def rank(transport: Any) -> None:
        stage = pipe.build_stage(transport.rank, "cpu", transport)
        plan = get_schedule(schedule)(2, 3)
        Schedule.from_plan(plan, stage, loss_fn=lambda out, _: out.square().mean()).step(x, target=x)

    LocalWorld(2).run(rank)
    for part in x.chunk(3):
        (reference(part).square().mean() / 3).backward()
    assert_same_grads(model, reference)


class Calls(nn.Module):
    """Calls what it is given between two layers."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(4, 4), Inner(call)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner[0](x)
        pipe_split()
        return self.inner[1](x)


class Inner(nn.Module):
    def __init__(self, call: Any) -> None:
        super().__init__()
        self.layer, self.call = nn.Linear(4, 4), call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer(x))


def test_a_reentrant_checkpoint_is_a_checkpoint() -> None:
    model, x = Calls(lambda v: checkpoint(torch.sin, v, use_reentrant=True)), torch.randn(3, 4)
    reference = copy.deepcopy(model)
    pipe = pipeline(model, (x,))
    forward_backward(pipe, (x,), {}, lambda out: out.sum())
    reference(x).sum().backward()
    assert_same_grads(model, reference)
    assert "checkpointed" in pipe.get_stage_module(1).print_readable()


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)


class Tells(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x * 2, "twice"


early = Rounded.apply


def _hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: grad * 2)
    return x


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x: early(x, 1.0), "Rounded.apply was taken from its class before the capture"),
        (lambda x: InPlace.apply(x) + 1, "InPlace writes to what it is given"),
        (lambda x: Tells.apply(x)[0], "Tells returns a str beside its tensors"),
        (lambda x: Rounded.apply(x, x.shape[0]), "or a size that may change"),
        (_hooked, "a gradient hook on a tensor inside forward would be lost"),
    ],
)
def test_what_would_be_lost_is_refused(call: Any, says: str) -> None:
    """With the submodule and the line."""
    with pytest.raises(CaptureError) as caught:
        pipeline(Calls(call), (torch.randn(3, 4),))
    text = str(caught.value)
    assert says in text
    assert "in inner.1 (Inner)" in text
    assert "test_functions.py:" in text


def test_backward_hooks_of_modules_are_refused_and_those_of_parameters_kept() -> None:
    model, x = Calls(torch.sin), torch.randn(3, 4)
    seen = []
    model.inner[0].weight.register_post_accumulate_grad_hook(seen.append)
    pipe = pipeline(model, (x,))
    pipe(x).sum().backward()
    assert len(seen) == 1
    model.inner[1].layer.register_full_backward_hook(lambda module, given, got: None)
    with pytest.raises(CaptureError, match=r"inner\.1\.layer \(Linear\) has a backward hook"):
        pipeline(model, (x,))
    assert torch.Tensor.register_hook.__qualname__ == "Tensor.register_hook", "put back"
    assert Rounded.apply == early
