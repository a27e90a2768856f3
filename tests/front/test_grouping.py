"""Rows of unequal length in microbatches of even cost: the gradient and the outputs are those of the batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipeline
from penstock.comm import LocalTransport, LocalWorld
from penstock.errors import PenstockError, SplitError, StageError
from penstock.front import GroupRows

LENGTHS = [9, 1, 1, 2, 8, 1, 2, 1]


def example() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return model, torch.randn(8, 4).double(), torch.randn(8, 3).double()


@pytest.mark.parametrize("schedule", ["1f1b", "interleavedzerobubble"])
def test_the_gradient_is_that_of_the_batch(schedule: str) -> None:
    model, x, y = example()
    plain = copy.deepcopy(model)
    output = plain(x)
    loss = nn.functional.mse_loss(output, y)
    loss.backward()
    asked: list[int] = []

    def lengths(x: Tensor) -> Tensor:
        asked.append(len(x))
        return torch.tensor(LENGTHS)

    def rank(transport: LocalTransport) -> tuple[dict[str, Tensor], Any]:
        pipe = Pipeline(
            copy.deepcopy(model), (x,), loss_fn=nn.functional.mse_loss, schedule=schedule, microbatches=4, profile=False,
            group=transport, group_rows=lengths,
        )  # fmt: skip
        for _ in range(2):  # a cold and a warm step
            pipe.zero_grad()
            result = pipe.step(x, target=y, outputs="all")
        return {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}, result

    found = LocalWorld(2).run(rank)
    assert asked == [8] * 5, "the rank that chooses a plan asks for the example; then each rank in each step"
    gradients = {name: grad for grads, _ in found for name, grad in grads.items()}
    assert gradients.keys() == dict(plain.named_parameters()).keys()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-12, atol=1e-14)
    for _, result in found:
        torch.testing.assert_close(result.outputs, output, rtol=1e-12, atol=1e-14)
        assert result.loss == pytest.approx(loss.item(), rel=1e-12)


@pytest.mark.parametrize("outputs", [None, "last"])
def test_a_target_alone_is_refused_on_all_ranks(outputs: Any) -> None:
    """Its rows would be in another order than those of the input; and so would the outputs be."""
    model, x, y = example()

    def rank(transport: LocalTransport) -> tuple[str, float]:
        pipe = Pipeline(
            copy.deepcopy(model), (x,), loss_fn=nn.functional.mse_loss, schedule="1f1b", microbatches=4, profile=False,
            group=transport, group_rows=lambda x: LENGTHS,
        )  # fmt: skip
        with pytest.raises(PenstockError) as caught:
            pipe.step(*([] if transport.rank else [x]), target=y if transport.rank else None, outputs=outputs)
        loss = pipe.step(x, target=y).loss  # the next one works
        assert loss is not None
        return str(caught.value), loss

    for text, loss in LocalWorld(2).run(rank):
        assert "Give them there too: step(x, target=y)" in text
        assert loss == pytest.approx(nn.functional.mse_loss(model(x), y).item(), rel=1e-12)


def test_what_cannot_be_grouped() -> None:
    model, x, y = example()
    transport = LocalWorld(1).transports[0]

    def pipe(**options: Any) -> Pipeline:
        return Pipeline(
            model, (x,), loss_fn=nn.functional.mse_loss, microbatches=4, profile=False, group=transport, **options
        )

    with pytest.raises(SplitError, match="3 lengths for a batch of 8 rows"):
        pipe(group_rows=lambda x: [1, 2, 3]).step(x, target=y)
    with pytest.raises(SplitError, match=r"gave a tensor of shape \(8, .*one number a row"):
        pipe(group_rows=lambda x: x).step(x, target=y)
    with pytest.raises(SplitError, match="no room"):
        pipe(group_rows=GroupRows(lambda x: LENGTHS, longest=7)).step(x, target=y)
    with pytest.raises(StageError, match="leave one out"):
        pipe(group_rows=lambda x: LENGTHS, target_chunk_spec=0)
    with pytest.raises(StageError, match="expected a function"):
        pipe(group_rows=LENGTHS)
