"""A backward in two parts over a graph that exists already, as programs call torch's functions for it."""

from __future__ import annotations

import copy

import torch
from torch import nn

from penstock.compat._backward import stage_backward_input, stage_backward_weight


def test_a_transformer_layer_in_two_parts() -> None:
    """Its parameters meet at many joints: groups are told apart as things, since their tensors have no one truth value."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).double()
    plain = copy.deepcopy(layer)
    x = torch.randn(2, 3, 16, dtype=torch.float64, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    plain(other).square().sum().backward()

    loss = layer(x).square().sum()
    found, groups = stage_backward_input([loss], None, [x], layer.parameters())
    torch.testing.assert_close(found[0], other.grad)
    assert len(groups) > 1
    stage_backward_weight(layer.parameters(), groups)
    for mine, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
