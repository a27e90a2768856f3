"""A plain loop over microbatches in float64, beside the same stages in a pipeline over ranks as threads.

assert same(trained(make(), x, schedule="gpipe", recompute=True), looped(make(), x))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from penstock.comm import LocalTransport, LocalWorld
from penstock.run import Schedule
from penstock.schedules import get_schedule
from penstock.stage.pipeline_stage import PipelineStage

MICROBATCHES = 4
WIDTH = 4


def batch(rows: int = 8, seed: int = 1) -> Tensor:
    return torch.randn(rows, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def looped(modules: list[nn.Module], x: Tensor, *, steps: int = 1, loss: Any = loss_fn) -> list[Tensor]:
    """Losses of the microbatches, and the gradients that have added up: what a pipeline must give too."""
    losses: list[Tensor] = []
    for _ in range(steps):
        for rows in x.tensor_split(MICROBATCHES):
            value: Any = rows.clone()
            for module in modules:
                value = module(value)
            one = loss(value, torch.zeros_like(value))
            (one * (len(rows) / len(x))).backward()
            losses.append(one.detach())
    return [*losses, *gradients(modules)]


def trained(
    modules: list[nn.Module],
    x: Tensor,
    *,
    schedule: str = "gpipe",
    steps: int = 1,
    loss: Any = loss_fn,
    ranks: int = 2,
    **options: Any,
) -> list[Tensor]:
    """The same from a pipeline over ranks as threads."""

    def rank(transport: LocalTransport) -> list[Tensor]:
        plan = get_schedule(schedule)(ranks, MICROBATCHES, stages_per_rank=len(modules) // ranks)
        own = plan.placement.stages_of(transport.rank)
        stages = [PipelineStage(modules[i], i, len(modules), "cpu", group=transport) for i in own]
        runner = Schedule.from_plan(plan, stages, loss_fn=loss, **options)
        found: list[Tensor] = []
        for _ in range(steps):
            losses: list[Tensor] = []
            runner.step(x.clone(), target=torch.zeros_like(x), losses=losses)
            found += [one.detach() for one in losses]
        return found

    last = get_schedule(schedule)(ranks, MICROBATCHES, stages_per_rank=len(modules) // ranks).placement.ranks[-1]
    return [*LocalWorld(ranks).run(rank)[last], *gradients(modules)]


def gradients(modules: list[nn.Module]) -> list[Tensor]:
    return [p.grad.clone() for module in modules for p in module.parameters() if p.grad is not None]


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference between two lists of tensors of the same shapes."""
    if (shapes := [one.shape for one in found]) != (others := [one.shape for one in expected]):
        raise ValueError(
            f"tensors of other shapes, or more of them: {shapes}, {others}"
        )  # no failure that a test may expect
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
