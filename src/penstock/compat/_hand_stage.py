"""One stage at work through its own methods, and the messages that it says it has."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from penstock.batch.batch import NO_BATCH, Batch
from penstock.comm.messages import Work
from penstock.compat._exchange import batch_p2p
from penstock.compat._orders import NamedAction
from penstock.compat._siblings import is_overridden
from penstock.compat._stage_base import _PipelineStageBase
from penstock.errors import RunError
from penstock.nest import Value
from penstock.plan import Op
from penstock.run.channel import Channel

if TYPE_CHECKING:
    from penstock.compat._by_hand import HandProgram
    from penstock.compat._schedule import _PipelineSchedule

ASK = {
    Op.SEND_F: "get_fwd_send_ops",
    Op.RECV_F: "get_fwd_recv_ops",
    Op.SEND_B: "get_bwd_send_ops",
    Op.RECV_B: "get_bwd_recv_ops",
}


@dataclass
class PipelineContext:
    """What a user's function for a kind of action is given beside the action."""

    schedule_ref: _PipelineSchedule
    arg_mbs: Sequence[tuple[Value, ...]] | None = None
    kwarg_mbs: Sequence[dict[str, Value]] | None = None
    target_mbs: Sequence[Value] | None = None
    losses: list[Tensor] | None = None


class CustomFunctionProtocol(Protocol):
    """A user's function for a kind of action."""

    def __call__(self, action: NamedAction, ctx: PipelineContext) -> object: ...


class HandBox:
    """The messages of one kind of one stage. The stage says what they are."""

    def __init__(self, op: Op, run: HandRun, channel: Channel, program: HandProgram) -> None:
        self.op, self.run, self.program, self._channel = op, run, program, channel
        received = {Op.RECV_F: program.schedule.fwd_recv_ops, Op.RECV_B: program.schedule.bwd_recv_ops}
        self.posted = received.get(op, {})  # by stage and microbatch; sends are kept by the channel

    @property
    def channel(self) -> Channel | None:
        """None before both ends know what the messages look like: there are none then."""
        return self._channel if self.program.known else None

    def post(self, microbatch: int) -> None:
        channel, stage, sends = self._channel, self.run.stage, self.op.row.sends
        if not sends:
            infos = stage.args_recv_info if self.op is Op.RECV_F else stage.grad_recv_info
            stage._with_buffers(infos.get(microbatch, ()))
        ops = getattr(stage, ASK[self.op])(microbatch)
        stage._posted.add((self.op.name, microbatch))
        try:
            works = batch_p2p(ops)
        except RuntimeError as error:
            channel.fail(error)
        if not sends:
            self.posted[stage.stage_index, microbatch] = works
            return
        channel.sent.extend(works)
        # Stages beyond the next one receive an output later, and nobody may wait for that here.
        near = (None, stage.stage_index + 1)
        if channel.reap_after is not None and all(k in near for each in stage.act_send_info.values() for k in each):
            channel.wait_for_sent(len(channel.sent) - channel.reap_after)

    send = post

    def wait(self, works: list[Work]) -> None:
        channel = self._channel
        channel.transport.awaited = channel.peer
        try:
            for work in works:
                channel.wait(work)
        except RuntimeError as error:
            channel.fail(error)

    def drain_send(self, microbatch: int) -> None:
        if self.is_posted(microbatch):
            return
        stage, known = self.run.stage, self.run.stage._stage_meta
        if self.op is Op.SEND_F:
            stage.fwd_cache[microbatch] = tuple(meta and stage._to_tensor(meta) for meta in known.outputs or ()), []
        else:
            stage.bwd_cache[microbatch] = (None,) * len(known.inputs or ())
        self.post(microbatch)

    def drain_receive(self, microbatch: int) -> None:
        if not self.is_posted(microbatch):
            self.post(microbatch)

    def is_posted(self, microbatch: int) -> bool:
        """A loop of the user's own may have done so already."""
        return (self.op.name, microbatch) in self.run.stage._posted

    def pending(self) -> list[Work]:
        mine = [key for key in self.posted if key[0] == self.run.stage.stage_index]
        return [work for key in mine for work in self.posted.pop(key)]

    def clear(self) -> None:
        self.posted.clear()


class HandRun:
    """One stage of this rank, driven through its own methods."""

    compiled = None  # ahead; a stage of this kind is compiled when its first microbatch comes

    def __init__(self, stage: _PipelineStageBase, program: HandProgram) -> None:
        self.stage, self.program = stage, program
        self.module = stage.submod
        self.inputs = NO_BATCH
        self.number = 0

    def begin(self, inputs: Batch, number: int, *, uneven: bool) -> None:
        self.inputs, self.number = inputs, number
        stage, setting = self.stage, self.program.setting
        stage.has_backward = setting.grad
        stage._begin_step(setting.adapters[stage.stage_index])

    def results(self) -> tuple[list[Tensor], list[Value]]:
        outputs = list(self.stage.output_chunks) if self.inputs.keep_outputs else []
        return list(self.program.context.losses or ()), outputs

    def left_over(self) -> list[str]:
        return []

    def clear(self) -> None:
        self.inputs = NO_BATCH

    # -- the actions

    def forward(self, microbatch: int) -> None:
        """F."""
        stage, program = self.stage, self.program
        schedule, context, index = program.schedule, program.context, self.stage.stage_index
        if not stage.is_first and index - 1 not in program.runs:
            self.arrived(Op.RECV_F, microbatch, "its input")
        rng, keep = program.setting.rng, self.inputs.keep_outputs
        args, kwargs = (context.arg_mbs or [])[microbatch], (context.kwarg_mbs or [])[microbatch]
        with nullcontext() if rng is None else rng.at(index, microbatch, self.number):
            output = stage.forward_one_chunk(microbatch, args, kwargs, save_forward_output=keep)
            schedule._maybe_compute_loss(stage, output, context.target_mbs, microbatch, self.inputs.loss_kwargs)
        if index + 1 in program.runs:
            program.runs[index + 1].stage.set_local_fwd_input(output, microbatch)
        elif not stage.has_backward and stage.is_last:
            stage.fwd_cache.pop(microbatch, None)

    def backward_input(self, microbatch: int) -> None:
        """I."""
        self.backward(microbatch, full=False)

    def backward(self, microbatch: int, *, full: bool = True) -> None:
        """B."""
        stage, program, index = self.stage, self.program, self.stage.stage_index
        if not stage.is_last and index + 1 not in program.runs:
            self.arrived(Op.RECV_B, microbatch, "the gradient of its output")
        loss = program.schedule._maybe_get_loss(stage, microbatch)
        last = self.count() if full else False
        stage.backward_one_chunk(microbatch, loss=loss, full_backward=full, last_backward=last)
        if index - 1 in program.runs:
            program.runs[index - 1].stage.set_local_bwd_input(stage.get_local_bwd_output(microbatch), microbatch)

    def backward_weight(self, microbatch: int) -> None:
        """W."""
        self.stage.backward_weight_one_chunk(microbatch, last_backward=self.count())

    def unshard(self) -> None:
        self.stage._adapter.unshard()
        self.program.schedule.unsharded_stages.add(self.stage.stage_index)

    def reshard(self) -> None:
        self.stage._adapter.reshard()
        self.program.schedule.unsharded_stages.discard(self.stage.stage_index)

    def reduce_grad(self) -> None:
        stage, schedule = self.stage, self.program.schedule
        factor = schedule.num_microbatches if schedule.scale_grads else 1
        # What reduces gradients leaves them in other tensors.
        if not stage._adapter.reduces and is_overridden(stage, "perform_reduce_grad"):
            stage._give_undivided(factor)
        stage.perform_reduce_grad(factor)
        schedule.unsharded_stages.discard(stage.stage_index)

    def arrived(self, op: Op, microbatch: int, what: str) -> None:
        """Wait for what this stage needs."""
        index = self.stage.stage_index
        box = self.program.by_op.get((op, index))
        if box is None or (index, microbatch) not in box.posted:
            raise RunError(f"stage {index}, microbatch {microbatch}: {what} never came; the order does not receive it")
        box.wait(box.posted.pop((index, microbatch)))

    def count(self) -> bool:
        """Count a backward of the stage; whether it was the last."""
        counter, index = self.program.schedule.backward_counter, self.stage.stage_index
        counter[index] += 1
        return counter[index] == self.program.plan.num_microbatches
