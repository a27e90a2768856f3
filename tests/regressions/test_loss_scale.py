"""A GradScaler given to a Pipeline whose losses are sums.

With `scale_grads=False` no weights were made for the microbatches, and the factor of the scaler, which travelled with
the weights, was lost: the scaler then divided gradients that nobody had multiplied.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import penstock


@pytest.mark.parametrize("scale_grads", [True, False])
def test_the_scaler_scales_the_loss_either_way(scale_grads: bool) -> None:
    x, y = torch.randn(2, 8, 4)
    model = nn.Linear(4, 4)
    grads = []
    for scale in (1.0, 1024.0):
        pipe = penstock.Pipeline(
            model,
            example=(x,),
            loss_fn=nn.functional.mse_loss,
            schedule="1f1b",
            microbatches=4,
            profile=False,
            scale_grads=scale_grads,
            loss_scale=torch.amp.GradScaler("cpu", init_scale=scale),
        )
        pipe.step(x, target=y)
        grads.append([p.grad for p in pipe.parameters()])
        pipe.zero_grad()
    torch.testing.assert_close(grads[1], [1024 * grad for grad in grads[0]])


def test_a_share_of_the_batch_is_not_rounded_to_the_type_of_the_scale() -> None:
    """The scale is a number of float32, and so was its product with the share of a microbatch: gradients of float64 were off by
    3e-8 of themselves."""
    torch.manual_seed(0)
    x, y = torch.randn(2, 10, 4, dtype=torch.float64)
    model = nn.Linear(4, 4).double()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    stage = penstock.PipelineStage(model, 0, 1, "cpu")
    pipe = penstock.Pipeline(stages=[stage], loss_fn=nn.MSELoss(), schedule="1f1b", microbatches=3, loss_scale=scaler)
    pipe.step(x, target=y)
    expected = torch.autograd.grad(1024 * nn.functional.mse_loss(model(x), y), list(model.parameters()))
    torch.testing.assert_close([p.grad for p in model.parameters()], list(expected), rtol=1e-12, atol=1e-11)


class Scaled(nn.Module):
    """Its first parameter is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.layer = nn.Parameter(torch.tensor(2.0)), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.layer(x) * self.factor
        return value


def test_a_first_parameter_that_is_one_number_is_scaled_like_others() -> None:
    """The flag of an overflow has one dimension, and was added to the gradient of the first parameter in place."""
    module = Scaled()
    stage = penstock.PipelineStage(module, 0, 1, "cpu")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    pipe = penstock.Pipeline(
        stages=[stage], schedule="gpipe", loss_fn=nn.functional.mse_loss, microbatches=2, loss_scale=scaler
    )
    pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4))
    assert module.factor.grad is not None
    assert torch.isfinite(module.factor.grad)
