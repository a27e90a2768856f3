"""Pipelines that are quick to make, for tests of what is saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock.comm import LocalTransport, LocalWorld

WIDTH = 4


def modules(ranks: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh()) for _ in range(ranks)]


def make(transport: LocalTransport | None = None, **options: Any) -> tuple[penstock.Pipeline, torch.optim.Optimizer]:
    """A stage a rank, and its optimizer."""
    rank, ranks = (0, 1) if transport is None else (transport.rank, transport.num_ranks)
    stage = penstock.PipelineStage(modules(ranks)[rank], rank, ranks, "cpu", group=transport)
    settings = {"schedule": "1f1b", "loss_fn": nn.functional.mse_loss, "microbatches": 2, **options}
    pipe = penstock.Pipeline(stages=[stage], **settings)
    return pipe, torch.optim.AdamW(pipe.parameters(), lr=0.01)


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(2, 4, WIDTH, generator=generator)
    return x, y


def train(pipe: penstock.Pipeline, optimizer: torch.optim.Optimizer, numbers: range) -> list[float | None]:
    losses = []
    for number in numbers:
        x, y = batch(number)
        losses.append(pipe.step(x, target=y).loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def everything(pipe: penstock.Pipeline, optimizer: Any) -> dict[str, Any]:
    """All that a load may change on a rank."""
    state = {f"{name}.{key}": v for name, p in pipe.named_parameters() for key, v in optimizer.state[p].items()}
    values = {name: value.clone() for name, value in {**pipe.state_dict(), **state}.items()}
    return {**values, "steps": pipe.schedule.steps, "lr": optimizer.param_groups[0]["lr"]}


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)

    return one.keys() == other.keys() and all(equal(value, other[name]) for name, value in one.items())


def saved(place: Path, *, ranks: int = 2, steps: int = 2, **options: Any) -> None:
    """A checkpoint after some steps."""

    def run(transport: LocalTransport) -> None:
        pipe, optimizer = make(transport)
        train(pipe, optimizer, range(steps))
        pipe.save(place, optimizer=optimizer, extra={"steps": steps}, **options)

    LocalWorld(ranks).run(run)
