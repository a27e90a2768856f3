"""What libraries build on private parts: stages that compute for themselves, functions for every kind of action, threads."""

from __future__ import annotations

import sys
import threading

import torch
import torch.distributed as dist
from reporting import checksum, report
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleDualPipeV, ScheduleInterleavedZeroBubble
from torch.distributed.pipelining import schedules as kinds
from torch.distributed.pipelining._utils import flatten_args
from torch.distributed.pipelining.schedules import _Action, _PipelineContext, _wait_batch_p2p
from torch.distributed.pipelining.stage import _normalize_model_output_as_tuple

MICROBATCHES = 4
WIDTH = 5


class Plain(PipelineStage):
    """Does its forward by itself, and leaves in the cache what a backward needs."""

    def forward_one_chunk(self, fwd_chunk_id, args, kwargs=None, save_forward_output=True):
        inputs = args if self.is_first else self._retrieve_recv_activations(fwd_chunk_id)
        output = self.forward_maybe_with_nosync(*inputs, **(kwargs or {}))
        if self.is_last and save_forward_output:
            self.output_chunks.append(output)
        outputs = tuple(torch.clone(value) for value in _normalize_model_output_as_tuple(output))
        self.fwd_cache[fwd_chunk_id] = (outputs, flatten_args(inputs) + flatten_args(kwargs or {}))
        return output


class Functional(PipelineStage):
    """Has no backward of its own: the functions below keep its gradients in `pending` until they are reduced."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.weights, self.pending, self.saved = [], [], {}


def stages_of(ctx: _PipelineContext) -> dict[int, PipelineStage]:
    return {stage.stage_index: stage for stage in ctx.schedule_ref._stages}


def gather(action: _Action, ctx: _PipelineContext) -> None:
    stage = stages_of(ctx)[action.stage_index]
    stage.weights = [parameter.detach() for parameter in stage.submod.parameters()]


def let_go(action: _Action, ctx: _PipelineContext) -> None:
    stages_of(ctx)[action.stage_index].weights = []


def forward(action: _Action, ctx: _PipelineContext) -> None:
    stages, index, microbatch = stages_of(ctx), action.stage_index, action.microbatch_index
    stage = stages[index]
    if not stage.is_first and index - 1 not in stages:
        _wait_batch_p2p(ctx.schedule_ref.fwd_recv_ops.pop((index, microbatch)))
    (x,) = ctx.arg_mbs[microbatch] if stage.is_first else stage._retrieve_recv_activations(microbatch)
    weight, bias = stage.weights
    output = torch.tanh(x.detach() @ weight.T + bias)
    stage.fwd_cache[microbatch] = (_normalize_model_output_as_tuple(output), [x.detach(), output])
    if stage.is_last:
        stage.output_chunks.append(output)
        ctx.schedule_ref._internal_losses.append((output - ctx.target_mbs[microbatch]).square().sum())
    if index + 1 in stages:
        stages[index + 1].set_local_fwd_input(output, microbatch)


def backward_input(action: _Action, ctx: _PipelineContext) -> None:
    stages, index, microbatch = stages_of(ctx), action.stage_index, action.microbatch_index
    stage = stages[index]
    if not stage.is_last and index + 1 not in stages:
        _wait_batch_p2p(ctx.schedule_ref.bwd_recv_ops.pop((index, microbatch)))
    ctx.schedule_ref.backward_counter[index] += 1
    _, (x, output) = stage.fwd_cache.pop(microbatch)
    if stage.is_last:
        grad = 2 * (output - ctx.target_mbs[microbatch])
    else:
        (grad,) = stage._retrieve_recv_grads(microbatch)
    grad = grad * (1 - output**2)
    stage.saved[microbatch] = (x, grad)
    stage.bwd_cache[microbatch] = (None if stage.is_first else grad @ stage.weights[0],)
    if index - 1 in stages:
        stages[index - 1].set_local_bwd_input(stage.get_local_bwd_output(microbatch), microbatch)


def backward_weight(action: _Action, ctx: _PipelineContext) -> None:
    stage = stages_of(ctx)[action.stage_index]
    x, grad = stage.saved.pop(action.microbatch_index)
    stage.pending.append((grad.T @ x, grad.sum(0)))


def backward(action: _Action, ctx: _PipelineContext) -> None:
    backward_input(action, ctx)
    backward_weight(action, ctx)


def reduce_grad(action: _Action, ctx: _PipelineContext) -> None:
    stage = stages_of(ctx)[action.stage_index]
    for parameter, grads in zip(stage.submod.parameters(), zip(*stage.pending, strict=True), strict=True):
        parameter.grad = sum(grads)
    stage.pending = []


def overlapped(action: _Action, ctx: _PipelineContext) -> None:
    """The backward on a thread beside the forward."""
    schedule, stages = ctx.schedule_ref, stages_of(ctx)
    ahead, back = (stages[part.stage_index] for part in action.sub_actions)
    there, here = (part.microbatch_index for part in action.sub_actions)
    if not ahead.is_first and ahead.stage_index - 1 not in stages:
        _wait_batch_p2p(schedule.fwd_recv_ops.pop((ahead.stage_index, there)))
    if not back.is_last and back.stage_index + 1 not in stages:
        _wait_batch_p2p(schedule.bwd_recv_ops.pop((back.stage_index, here)))

    def run_backward() -> None:
        schedule._assert_unsharded(back)
        loss = schedule._maybe_get_loss(back, here)
        schedule.backward_counter[back.stage_index] += 1
        last = schedule.backward_counter[back.stage_index] == schedule._n_microbatches
        back.backward_one_chunk(here, loss=loss, full_backward=True, last_backward=last)
        if back.stage_index - 1 in stages:
            stages[back.stage_index - 1].set_local_bwd_input(back.get_local_bwd_output(here), here)

    thread = threading.Thread(target=run_backward)
    thread.start()
    schedule._assert_unsharded(ahead)
    output = ahead.forward_one_chunk(there, ctx.arg_mbs[there], ctx.kwarg_mbs[there])
    schedule._maybe_compute_loss(ahead, output, ctx.target_mbs, there)
    if ahead.stage_index + 1 in stages:
        stages[ahead.stage_index + 1].set_local_fwd_input(output, there)
    thread.join()


def train(schedule, stages, x, y):
    losses: list[torch.Tensor] = []
    for _ in range(2):
        for stage in stages:
            stage.submod.zero_grad()
        has_last = any(stage.is_last for stage in stages)
        given = [x] if any(stage.is_first for stage in stages) else []
        schedule.step(*given, **({"target": y, "losses": losses} if has_last else {}))
    for stage in stages:
        for parameter in stage.submod.parameters():
            parameter.data = parameter.grad
    return [[float(loss) for loss in losses], [checksum(stage.submod) for stage in stages]]


def main() -> None:
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, device, numbers = dist.get_rank(), torch.device("cpu"), {}
    loss_fn = nn.MSELoss(reduction="sum")
    torch.manual_seed(1)
    x, y = torch.randn(2, 2 * MICROBATCHES, WIDTH).unbind()

    def layers() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]

    stages = [Plain(layers()[i], i, 4, device) for i in (rank, rank + 2)]
    schedule = ScheduleInterleavedZeroBubble(stages, MICROBATCHES, loss_fn=loss_fn, scale_grads=False)
    numbers["plain"] = train(schedule, stages, x, y)

    given, made = x[:2].clone(), x[:2].clone().requires_grad_()
    stages = [
        Functional(layers()[i][0], i, 4, device, input_args=(made if i else given,), output_args=(made,))
        for i in (rank, rank + 2)
    ]
    schedule = ScheduleInterleavedZeroBubble(stages, MICROBATCHES, scale_grads=False, backward_requires_autograd=False)
    schedule._has_backward = True
    functions = [forward, backward, backward_input, backward_weight, gather, let_go, reduce_grad]
    names = ["FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "UNSHARD", "RESHARD", "REDUCE_GRAD"]
    for name, function in zip(names, functions, strict=True):
        schedule.register_custom_function(getattr(kinds, name), function)
    with torch.no_grad():
        numbers["functional"] = train(schedule, stages, x, y)

    stages = [PipelineStage(layers()[i], i, 4, device) for i in (rank, 3 - rank)]
    schedule = ScheduleDualPipeV(stages, MICROBATCHES, loss_fn=loss_fn, scale_grads=False)
    schedule.register_custom_function(kinds.OVERLAP_F_B, overlapped)
    numbers["threads"] = train(schedule, stages, x, y)
    report(sys.argv[1], numbers)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
