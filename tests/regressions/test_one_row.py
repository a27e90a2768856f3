"""Microbatches of one row, for which a captured model is traced on its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from tests.regressions.plain_loop import MICROBATCHES, WIDTH, batch, difference, gradients, looped, loss_fn


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="as it is"),
        pytest.param({"recompute": True}, id="recompute"),
    ],
)
def test_a_short_last_batch(options: dict[str, Any]) -> None:
    """The last batch of an epoch had one row a microbatch. With recompute it raised "the forward saved 16 tensors for its
    backward, and when it was run again 5", which ended an epoch of Lightning's."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))).double()
    plain = copy.deepcopy(model)
    settings: dict[str, Any] = {"loss_fn": loss_fn, "microbatches": MICROBATCHES, "schedule": "gpipe", "profile": False}
    pipe = penstock.Pipeline(model, (batch(),), num_stages=1, **settings, **options)
    for x in (batch(), short := batch(MICROBATCHES)):
        pipe.step(x, target=torch.zeros_like(x))
    looped([plain], batch())
    looped([plain], short)
    by_name = dict(plain.named_parameters())
    assert [name for name, _ in pipe.named_parameters()] == [*by_name]
    found = [p.grad for _, p in pipe.named_parameters() if p.grad is not None]
    assert difference(found, gradients([plain])) < 1e-12
