"""Head and loss slice by slice: the same numbers, and never more logits than one slice."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock.comm import LocalTransport, LocalWorld
from penstock.stage.held import Held

WIDTH, WORDS, LENGTH, IGNORED = 16, 500, 64, -100


def data(rows: int = 8, *, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, LENGTH, WIDTH, generator=generator, dtype=dtype)
    target = torch.randint(0, WORDS, (rows, LENGTH), generator=generator)
    target[0, :10] = IGNORED
    return hidden, target


def whole(hidden: Tensor, target: Tensor, head: nn.Module, **options: Any) -> Tensor:
    return functional.cross_entropy(head(hidden).flatten(0, 1), target.flatten(), **options)


def gradients(loss: Tensor, *tensors: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, tensors))


@pytest.mark.parametrize("general", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("rows", [1, 100, 10_000])
def test_the_same_loss_and_gradients(rows: int, reduction: str, bias: bool, general: bool) -> None:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, WORDS, bias=bias).double()
    hidden, target = data(2)
    hidden.requires_grad_()
    used: Any = nn.Sequential(head) if general else head  # a head of another kind takes the other way
    found = penstock.chunked_loss(hidden, target, used, rows=rows, reduction=reduction)
    expected = whole(hidden, target, head, reduction=reduction)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    tensors = (hidden, *head.parameters())
    for a, b in zip(gradients(found, *tensors), gradients(expected, *tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("way", ["linear", "in blocks", "general"])
def test_gradients_of_many_slices_are_added_up_in_float32(way: str, autocast: bool) -> None:
    """In bfloat16 a sum of 512 equal parts would stop growing at a half of itself."""
    torch.manual_seed(0)
    width = 4 * WIDTH if way == "in blocks" else WIDTH
    head = nn.Linear(width, 8).to(torch.float32 if autocast else torch.bfloat16)
    used: Any = nn.Sequential(head) if way == "general" else head
    hidden = torch.randn(1, width).expand(1024, width).to(head.weight.dtype)
    target = torch.zeros(1024, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = gradients(penstock.chunked_loss(hidden, target, used, rows=2), *head.parameters())
    exact = nn.Linear(width, 8)
    exact.load_state_dict(head.state_dict())
    expected = gradients(functional.cross_entropy(exact(hidden.float()), target), *exact.parameters())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=0.02, atol=1e-4 * float(b.abs().max()))


def test_a_parameter_that_no_slice_uses_has_no_gradient() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(WIDTH, WORDS).bfloat16(), nn.Linear(2, 2).bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)  # type: ignore[no-any-return]

    head, (hidden, target) = Head(), data(2, dtype=torch.bfloat16)
    penstock.chunked_loss(hidden, target, head, rows=50).backward()
    assert head.used.weight.grad is not None
    assert head.idle.weight.grad is None


def test_any_loss_that_is_a_sum() -> None:
    head, (hidden, target) = nn.Linear(WIDTH, WORDS).double(), data(2)
    smooth = partial(functional.cross_entropy, reduction="sum", label_smoothing=0.1)
    found = penstock.chunked_loss(hidden, target, head, rows=50, loss_fn=smooth)
    torch.testing.assert_close(found, whole(hidden, target, head, label_smoothing=0.1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("general", [False, True])
def test_never_more_logits_than_one_slice(general: bool) -> None:
    hidden, target = data(32, dtype=torch.float32)
    hidden.requires_grad_()
    linear = nn.Linear(WIDTH, WORDS)
    head: Any = nn.Sequential(linear) if general else linear
    for parameter in head.parameters():
        parameter.grad = torch.zeros_like(parameter)
    logits = hidden.shape[0] * LENGTH * WORDS * 4

    def peak(loss: Any) -> int:
        with Held() as held:
            loss().backward()
        return held.most

    rows = 64
    sliced = peak(lambda: penstock.chunked_loss(hidden, target, head, rows=rows))
    plain = peak(lambda: whole(hidden, target, head))
    one = rows * WORDS * 4
    beside = 4 * hidden.nbytes + 3 * sum(p.nbytes for p in head.parameters())
    assert plain > 2 * logits
    assert one <= sliced <= 4 * one + beside < plain / 4


class Model(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.rows: int | None = 100
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.layers(self.embed(tokens))
        if self.rows is None:
            return {"loss": whole(hidden, labels, self.head)}
        return {"loss": penstock.chunked_loss(hidden, labels, self.head, rows=self.rows)}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_in_a_captured_pipeline_with_full_and_split_backward(schedule: str, tied: bool) -> None:
    def run(rows: int | None) -> list[Any]:
        torch.manual_seed(3)
        model = Model(tied=tied)
        model.rows = rows
        tokens, labels = torch.randint(0, WORDS, (2, 8, LENGTH)).unbind()

        def rank(transport: LocalTransport) -> Any:
            options: dict[str, Any] = {"schedule": schedule, "microbatches": 4, "profile": False, "group": transport}
            pipe = penstock.Pipeline(model, (tokens,), example_kwargs={"labels": labels}, **options)
            loss = pipe.step(tokens, labels=labels).loss
            return loss, {name: p.grad for name, p in pipe.named_parameters()}

        return LocalWorld(2).run(rank)

    for (loss, grads), (expected, wanted) in zip(run(100), run(None), strict=True):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert grads.keys() == wanted.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, wanted[name], rtol=1e-4, atol=1e-6)


def test_a_profile_knows_its_bytes() -> None:
    tokens, labels = torch.randint(0, WORDS, (2, 8, LENGTH)).unbind()

    def layers(rows: int | None) -> Any:
        model = Model(tied=False)
        model.rows = rows
        return penstock.profile(model, (tokens,), example_kwargs={"labels": labels}, repeats=1).layers

    logits, one = 8 * LENGTH * WORDS * 4, 64 * WORDS * 4
    assert max(layer.activation_to_input for layer in layers(None)) >= logits
    sliced = layers(64)
    assert sum(layer.activation_to_input for layer in sliced) < logits
    assert 2 * one <= max(layer.backward_peak for layer in sliced) < logits


def test_what_cannot_be_is_refused() -> None:
    hidden, target = data(2)
    head = nn.Linear(WIDTH, WORDS).double()
    with pytest.raises(penstock.errors.StageError, match="reduction='none'"):
        penstock.chunked_loss(hidden, target, head, reduction="none")
    with pytest.raises(penstock.errors.StageError, match="expected a target for each row"):
        penstock.chunked_loss(hidden, target[:, :3], head)
    with pytest.raises(penstock.errors.StageError, match="at least 1 row"):
        penstock.chunked_loss(hidden, target, head, rows=0)
