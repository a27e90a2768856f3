"""Pipelines on an accelerator, and the same model in a plain loop on the CPU: what the tests of this folder run in workers."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 8
ROWS = 2  # of a microbatch


@dataclass
class Trained:
    """What one rank has to tell."""

    grads: dict[str, Tensor] = field(default_factory=dict)  # by "stage.name", on the CPU
    losses: list[float] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)  # of the host, in a warm step
    violations: list[str] = field(default_factory=list)  # races, use after free, fresh memory
    communicators: list[str] = field(default_factory=list)
    unfinished: int = 0  # 1 if the device still worked when the last step returned
    neighbours: int = 0


def block(stage: int) -> nn.Module:
    torch.manual_seed(100 + stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)).double()


def batch(microbatches: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(7)
    rows = ROWS * microbatches
    return torch.randn(rows, WIDTH, dtype=torch.float64), torch.randn(rows, WIDTH, dtype=torch.float64)


def expected(stages: int, microbatches: int) -> dict[str, Tensor]:
    """The gradients of a plain loop over microbatches, of one step."""
    modules = [block(stage) for stage in range(stages)]
    x, y = batch(microbatches)
    for part, target in zip(x.split(ROWS), y.split(ROWS), strict=True):
        for module in modules:
            part = module(part)
        (nn.functional.mse_loss(part, target) / microbatches).backward()
    return {
        f"{stage}.{name}": parameter.grad
        for stage, module in enumerate(modules)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def train(
    device: torch.device, name: str, stages_per_rank: int, microbatches: int, steps: int = 3, receives: Any = None
) -> Trained:
    """Some steps of penstock's schedule of this name, or of a plan file; the gradients are those of the last one."""
    import torch.distributed as dist

    from penstock.plan import load
    from penstock.run import Schedule
    from penstock.schedules import get_schedule
    from penstock.stage.pipeline_stage import PipelineStage

    rank, size = dist.get_rank(), dist.get_world_size()
    in_file = name.endswith(".csv")
    plan = load(name) if in_file else get_schedule(name)(size, microbatches, stages_per_rank=stages_per_rank)
    stages = [
        PipelineStage(block(index).to(device), index, plan.num_stages, device)
        for index in plan.placement.stages_of(rank)
    ]
    schedule = Schedule.from_plan(plan, stages, loss_fn=nn.functional.mse_loss, receives=receives)
    neighbours = {
        plan.placement.rank_of(other)
        for stage in stages
        for other in (stage.stage_index - 1, stage.stage_index + 1)
        if 0 <= other < plan.num_stages
    } - {rank}
    trained = run(device, schedule, {s.stage_index: s.submod for s in stages}, plan.num_stages, microbatches, steps)
    trained.neighbours = len(neighbours)
    return trained


def train_torch(device: torch.device, name: str, stages_per_rank: int, microbatches: int, steps: int = 3) -> Trained:
    """The same with torch's own schedule of this class name."""
    import torch.distributed as dist
    import torch.distributed.pipelining as torch_pipelining

    rank, size = dist.get_rank(), dist.get_world_size()
    total = size * stages_per_rank
    v_shaped = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    mine = [rank, 2 * size - 1 - rank] if v_shaped else [rank + n * size for n in range(stages_per_rank)]
    example = torch.zeros(ROWS, WIDTH, dtype=torch.float64, device=device)
    wanting = example.clone().requires_grad_()
    stages = [
        torch_pipelining.PipelineStage(
            block(index).to(device),
            index,
            total,
            device,
            input_args=(wanting if index else example,),
            output_args=(wanting,),
        )
        for index in mine
    ]
    make: Any = getattr(torch_pipelining, name)
    single = name in ("ScheduleGPipe", "Schedule1F1B")
    schedule = make(stages[0] if single else stages, n_microbatches=microbatches, loss_fn=nn.functional.mse_loss)
    return run(device, schedule, {s.stage_index: s.submod for s in stages}, total, microbatches, steps)


def run(
    device: torch.device, schedule: Any, modules: dict[int, nn.Module], total: int, microbatches: int, steps: int
) -> Trained:
    """The simulated device does nothing until the host has issued the last step: whatever the host waited for would not come."""
    x, y = (part.to(device) for part in batch(microbatches))
    last = total - 1 in modules
    sim = simulation(device)
    losses: list[Tensor] = []
    with ExitStack() as held:
        for step in range(steps):
            for module in modules.values():
                module.zero_grad()
            if sim is not None and step == steps - 1:
                torch.accelerator.synchronize()
                sim.reset()
                held.callback(sim.hold().open)
            arguments = (x,) if 0 in modules else ()
            schedule.step(*arguments, target=y if last else None, losses=losses if last else None)
        waits = sim.waits() if sim is not None else []
        unfinished = not torch.accelerator.current_stream().query()
    torch.accelerator.synchronize()
    return Trained(
        {f"{i}.{n}": p.grad.cpu() for i, m in modules.items() for n, p in m.named_parameters() if p.grad is not None},
        [float(loss.detach()) for loss in losses],
        waits,
        sim.violations() if sim is not None else [],
        sim.communicators() if sim is not None else [],
        int(unfinished),
    )


def simulation(device: torch.device) -> Any:
    if device.type != "sim":
        return None
    from tests.accelerator.device import load

    return load()
