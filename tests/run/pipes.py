"""A small pipeline over threads, for tests of what a schedule takes and gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from penstock.comm import LocalTransport, LocalWorld
from penstock.plan import Plan
from penstock.run import Schedule
from penstock.schedules import get_schedule
from penstock.stage.pipeline_stage import PipelineStage

WIDTH = 4


def make_modules(num_stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(num_stages)]


def batch(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def stages_for(plan: Plan, transport: LocalTransport, modules: list[nn.Module], **options: Any) -> list[PipelineStage]:
    return [
        PipelineStage(modules[i], i, plan.num_stages, "cpu", group=transport, **options)
        for i in plan.placement.stages_of(transport.rank)
    ]


def on_ranks(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    function: Callable[[Schedule, int], Any],
    *,
    modules: list[nn.Module] | None = None,
    rendezvous: bool = True,
    **options: Any,
) -> list[Any]:
    """Call `function(schedule, rank)` on every rank."""
    plan = get_schedule(name)(num_ranks, num_microbatches)
    made = make_modules(plan.num_stages) if modules is None else modules
    options.setdefault("loss_fn", nn.functional.mse_loss)

    def rank(transport: LocalTransport) -> Any:
        schedule = Schedule.from_plan(plan, stages_for(plan, transport, made), **options)
        return function(schedule, transport.rank)

    return LocalWorld(num_ranks, rendezvous=rendezvous).run(rank)


def loop_grads(modules: list[nn.Module], x: Tensor, y: Tensor, num_microbatches: int) -> list[Tensor]:
    """Of the mean loss, by a plain loop, on copies."""
    import copy

    model = nn.Sequential(*copy.deepcopy(modules))
    model.zero_grad()
    for a, b in zip(x.tensor_split(num_microbatches), y.tensor_split(num_microbatches), strict=True):
        (nn.functional.mse_loss(model(a), b) * (len(a) / len(x))).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def grads_of(modules: list[nn.Module]) -> list[Tensor]:
    return [p.grad for module in modules for p in module.parameters() if p.grad is not None]


def close(got: list[Tensor], want: list[Tensor]) -> bool:
    return len(got) == len(want) and all(
        torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(got, want, strict=True)
    )
