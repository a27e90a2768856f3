"""A function of the user's own for overlapped pairs, which drives the stages and the receives itself."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from reporting import checksum, report
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleDualPipeV
from torch.distributed.pipelining.schedules import FORWARD, OVERLAP_F_B, _Action, _PipelineContext, _wait_batch_p2p

MICROBATCHES = 6
calls: list[str] = []


def forward(action: _Action, ctx: _PipelineContext) -> None:
    schedule = ctx.schedule_ref
    stages = {stage.stage_index: stage for stage in schedule._stages}
    index, microbatch = action.stage_index, action.microbatch_index
    stage = stages[index]
    if not stage.is_first and index - 1 not in stages:
        _wait_batch_p2p(schedule.fwd_recv_ops.pop((index, microbatch)))
    output = stage.forward_one_chunk(microbatch, ctx.arg_mbs[microbatch], ctx.kwarg_mbs[microbatch])
    schedule._maybe_compute_loss(stage, output, ctx.target_mbs, microbatch)
    if index + 1 in stages:
        stages[index + 1].set_local_fwd_input(output, microbatch)
    calls.append(str(action))


def overlapped(action: _Action, ctx: _PipelineContext) -> None:
    schedule = ctx.schedule_ref
    stages = {stage.stage_index: stage for stage in schedule._stages}
    first, second = action.sub_actions
    forward(first, ctx)
    index, microbatch = second.stage_index, second.microbatch_index
    stage = stages[index]
    if not stage.is_last and index + 1 not in stages:
        _wait_batch_p2p(schedule.bwd_recv_ops.pop((index, microbatch)))
    schedule.backward_counter[index] += 1
    stage.backward_one_chunk(
        microbatch,
        loss=schedule._maybe_get_loss(stage, microbatch),
        full_backward=True,
        last_backward=schedule.backward_counter[index] == schedule._n_microbatches,
    )
    if index - 1 in stages:
        stages[index - 1].set_local_bwd_input(stage.get_local_bwd_output(microbatch), microbatch)
    calls.append(str(action))


def main() -> None:
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4)]
    stages = [PipelineStage(layers[i], i, 4, torch.device("cpu")) for i in (rank, 3 - rank)]
    schedule = ScheduleDualPipeV(stages, MICROBATCHES, loss_fn=nn.MSELoss())
    schedule._prepare_schedule_with_comms(schedule.pipeline_order)
    schedule.register_custom_function(FORWARD, forward)
    schedule.register_custom_function(OVERLAP_F_B, overlapped)
    x, y = torch.randn(2, 2 * MICROBATCHES, 5).unbind()
    losses: list[torch.Tensor] = []
    for _ in range(2):
        for stage in stages:
            stage.submod.zero_grad()
        schedule.step(x, target=y, losses=losses) if rank == 0 else schedule.step()
    for stage in stages:
        for parameter in stage.submod.parameters():
            parameter.data = parameter.grad
    report(
        sys.argv[1],
        {"losses": [float(v) for v in losses], "grads": [checksum(s.submod) for s in stages], "calls": sorted(calls)},
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
