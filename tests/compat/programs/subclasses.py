"""Subclasses of the user's own: a runtime with its order, a schedule that fills pipeline_order, a stage that counts."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from reporting import checksum, report
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, _Action, _PipelineScheduleRuntime


def order(*rows: str) -> dict[int, list[_Action | None]]:
    return {rank: [_Action.from_str(cell) for cell in row.split(",")] for rank, row in enumerate(rows)}


class Split(_PipelineScheduleRuntime):
    def __init__(self, stages, n_microbatches, loss_fn=None, **options):
        super().__init__(stages, n_microbatches, loss_fn=loss_fn, **options)
        rows = order("0F0,0F1,0I0,0W0,0I1,0W1", "1F0,1I0,1F1,1I1,1W0,1W1")
        self._prepare_schedule_with_comms(rows)


class InTurn(PipelineScheduleMulti):
    def __init__(self, stages, n_microbatches, loss_fn=None, **options):
        super().__init__(stages, n_microbatches, loss_fn=loss_fn, **options)
        self.pipeline_order = order("0F0, ,2F0, , ,2B0, ,0B0", " ,1F0, ,3F0,3B0, ,1B0, ")
        self._validate_and_set_stage_mapping(self.pipeline_order)


class Counting(PipelineStage):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.seen: list[str] = []

    def forward_one_chunk(self, fwd_chunk_id, args, kwargs=None, **options):
        self.seen.append(f"F{fwd_chunk_id}")
        return super().forward_one_chunk(fwd_chunk_id, args, kwargs, **options)

    def backward_one_chunk(self, bwd_chunk_id, loss=None, full_backward=True, last_backward=False):
        self.seen.append(f"{'B' if full_backward else 'I'}{bwd_chunk_id}{'!' if last_backward else ''}")
        super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward)


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(count)]


def train(schedule, stages, x, y):
    rank = dist.get_rank()
    losses: list[torch.Tensor] = []
    for _ in range(2):
        for stage in stages:
            stage.submod.zero_grad()
        has_last = any(stage.is_last for stage in stages)
        schedule.step(*([x] if rank == 0 else []), **({"target": y, "losses": losses} if has_last else {}))
    for stage in stages:
        for parameter in stage.submod.parameters():
            parameter.data = parameter.grad
    return [[float(loss) for loss in losses], [checksum(stage.submod) for stage in stages]]


def main() -> None:
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    x, y = torch.randn(2, 4, 4).unbind()
    device = torch.device("cpu")
    numbers = {}
    stages = [PipelineStage(layers(2)[rank], rank, 2, device)]
    numbers["runtime"] = train(Split(stages, 2, loss_fn=nn.MSELoss()), stages, x, y)
    stages = [PipelineStage(layers(4)[i], i, 4, device) for i in (rank, rank + 2)]
    numbers["order"] = train(InTurn(stages, 1, loss_fn=nn.MSELoss(), scale_grads=False), stages, x, y)
    counting = [Counting(layers(2)[rank], rank, 2, device)]
    numbers["stage"] = train(Split(counting, 2, loss_fn=nn.MSELoss()), counting, x, y)
    numbers["seen"] = counting[0].seen
    report(sys.argv[1], numbers)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
