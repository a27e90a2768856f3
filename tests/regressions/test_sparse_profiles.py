"""Models with sparse embeddings are profiled, captured and recomputed as others are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.comm import LocalTransport, LocalWorld

WORDS, WIDTH, MICROBATCHES = 8, 4, 2


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH, sparse=True), *layers).double()


def batch() -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(1)
    return torch.randint(0, WORDS, (4, 3), generator=dice), torch.zeros(4, 3, WIDTH, dtype=torch.float64)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_sparse_embedding_is_profiled_and_trained(schedule: str, recompute: bool) -> None:
    """Counting the bytes of a layer asked the sparse gradient for its storage, which it has not: NotImplementedError."""
    x, y = batch()
    plain = model()
    nn.functional.mse_loss(plain(x), y).backward()
    expected = {name: p.grad.to_dense() for name, p in plain.named_parameters() if p.grad is not None}

    def rank(transport: LocalTransport) -> dict[str, Any]:
        options: dict[str, Any] = {"schedule": schedule, "microbatches": MICROBATCHES, "recompute": recompute}
        pipe = penstock.Pipeline(model(), (x,), loss_fn=nn.functional.mse_loss, group=transport, **options)
        pipe.step(x, target=y)
        return {name: p.grad.to_dense() for name, p in pipe.named_parameters() if p.grad is not None}

    found = {name: grad for each in LocalWorld(2).run(rank) for name, grad in each.items()}
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-9, atol=1e-12)
