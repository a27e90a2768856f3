"""What `penstock train tests.accelerator.train_job:build` trains: a small model whose loss falls."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.accelerator import pipes


def build() -> tuple[nn.Module, Any, Any, Any]:
    model = nn.Sequential(*(pipes.block(stage).float() for stage in range(4)))
    x, y = (part.float() for part in pipes.batch(4))
    return model, lambda step: ((x,), y), nn.functional.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1)
