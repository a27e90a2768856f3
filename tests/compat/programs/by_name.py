"""A trainer that finds its schedule by name and reads its orders. Arguments: a file for the ranks to meet, and the rank."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, _PipelineScheduleRuntime, get_schedule_class


def main() -> None:
    rank = int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
    for name in ("gpipe", "Interleaved1F1B", "interleavedzerobubble", "ZBVZeroBubble"):
        kind = get_schedule_class(name)
        single = issubclass(kind, PipelineScheduleSingle)
        num_stages = 2 if single else 4
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(num_stages)]
        x, y = torch.randn(16, 8), torch.randn(16, 8)
        mine = [rank] if single else [rank, 3 - rank if name == "ZBVZeroBubble" else rank + 2]
        stages = [PipelineStage(parts[i], i, num_stages, torch.device("cpu")) for i in mine]
        schedule = kind(stages[0] if single else stages, n_microbatches=4, loss_fn=nn.MSELoss())
        losses: list[torch.Tensor] = []
        last = num_stages - 1 in mine
        schedule.step(*((x,) if 0 in mine else ()), **({"target": y, "losses": losses} if last else {}))
        print(kind.__module__.split(".")[0])
        print(
            name,
            *(loss.item() for loss in losses),
            *(p.grad.norm().item() for i in mine for p in parts[i].parameters()),
        )
        if issubclass(kind, _PipelineScheduleRuntime):
            print("actions", sum(action is not None for action in schedule.pipeline_order[rank]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
