"""A trainer that picks its schedule by name, saves its order as CSV, reads it back, and evaluates in between."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from reporting import checksum, report
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    _PipelineScheduleRuntime,
    get_schedule_class,
)


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(count)]


def train(schedule, stages, x, y) -> list[list[float]]:
    rank, found = dist.get_rank(), []
    optimizer = torch.optim.SGD([p for s in stages for p in s.submod.parameters()], lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        has_last = any(stage.is_last for stage in stages)
        schedule.step(*([x] if rank == 0 else []), **({"target": y, "losses": losses} if has_last else {}))
        found.append([float(loss) for loss in losses])
        optimizer.step()
    return found


def main() -> None:
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), sys.argv[1]
    torch.manual_seed(1)
    x, y = torch.randn(2, 8, 6).unbind()
    numbers = {}

    def build(count: int, mine: list[int]) -> list[PipelineStage]:
        parts = layers(count)
        return [PipelineStage(parts[i], i, count, torch.device("cpu")) for i in mine]

    for name in ("1f1b", "GPipe", "Interleaved1F1B", "LoopedBFS", "interleavedzerobubble", "ZBVZeroBubble"):
        kind = get_schedule_class(name)
        several = issubclass(kind, PipelineScheduleMulti)
        count = 4 if several else 2
        mine = [rank] if not several else [rank, 3 - rank] if "ZBV" in name else [rank, rank + 2]
        stages = build(count, mine)
        schedule = kind(stages if several else stages[0], 4, loss_fn=nn.MSELoss())
        numbers[name] = [train(schedule, stages, x, y), [checksum(stage.submod) for stage in stages]]
        if name == "Interleaved1F1B":
            losses: list[torch.Tensor] = []
            schedule.eval(x) if rank == 0 else schedule.eval(target=y, losses=losses)
            numbers["evaluated"] = [float(loss) for loss in losses]
            file = str(Path(folder) / f"order{rank}.csv")
            schedule._dump_csv(file, "compute_only")
            again = _PipelineScheduleRuntime(stages := build(count, mine), 4, loss_fn=nn.MSELoss())
            again._load_csv(file)
            numbers["from csv"] = train(again, stages, x, y)
            again._dump_csv(file)
            lowered = _PipelineScheduleRuntime(stages := build(count, mine), 4, loss_fn=nn.MSELoss())
            lowered._load_csv(file, format="compute_comms")
            numbers["from lowered csv"] = train(lowered, stages, x, y)
    report(folder, numbers)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
