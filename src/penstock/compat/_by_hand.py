"""Steps through the stages' own methods: another table of handlers for the loop that everybody's steps go through.

penstock's own handlers never look at a stage's methods. Where a program overrides them (a stage with its own
`forward_one_chunk`, a function for OVERLAP_F_B that moves tensors itself) the actions are done by the handlers here, in the
words of torch.distributed.pipelining. What is around the actions is the same for all: preamble, verdict, ties, random
numbers, recording, and what happens when a rank fails. Every rank goes the same way: they ask one another before the first step.

Messages are what the stage says (`get_fwd_send_ops` and its kin), so both ends must know what they look like: a cold step
begins with passing that down the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from penstock.comm.framing import Receiving
from penstock.comm.messages import Work
from penstock.comm.transport import Transport
from penstock.compat._infer import encode_metas
from penstock.compat._metadata import _make_tensor_from_meta
from penstock.compat._p2p import batch_p2p
from penstock.compat._stage_base import _PipelineStageBase
from penstock.compat._vocabulary import NamedAction, of_action
from penstock.errors import RunError
from penstock.plan import Action, AnyAction, Op, Overlap
from penstock.plan.actions import peer_of
from penstock.run.channel import Channel, Poisoned
from penstock.run.handlers import HANDLERS
from penstock.run.layout import GradLayout, Layout
from penstock.run.program import Call, Handlers, Program, Setting
from penstock.run.protocol import verdict
from penstock.run.stage_run import StepInputs

if TYPE_CHECKING:
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

    schedule_ref: Any
    arg_mbs: list[tuple[Any, ...]] | None = None
    kwarg_mbs: list[dict[str, Any]] | None = None
    target_mbs: list[Any] | None = None
    losses: list[Any] | None = None


class CustomFunction(Protocol):
    """A user's function for a kind of action."""

    def __call__(self, action: NamedAction, ctx: PipelineContext) -> object: ...


class HandBox:
    """The messages of one kind of one stage. The stage says what they are."""

    def __init__(self, op: Op, run: HandRun, channel: Channel, program: HandProgram) -> None:
        self.op, self.run, self.program, self._channel = op, run, program, channel
        self.layouts: list[Layout | None] = []  # nobody describes these messages
        self.grad_layouts: list[GradLayout | None] = []
        recv = program.schedule.bwd_recv_ops if op is Op.RECV_B else program.schedule.fwd_recv_ops
        self.posted = recv if op in (Op.RECV_F, Op.RECV_B) else None

    @property
    def channel(self) -> Channel | None:
        """None before both ends know what the messages look like: there are none then."""
        return self._channel if self.program.known else None

    def post(self, microbatch: int) -> None:
        channel = self._channel
        ops = getattr(self.run.stage, ASK[self.op])(microbatch)
        try:
            works = batch_p2p(ops)
        except RuntimeError as error:
            channel.fail(error)
        if self.posted is not None:
            self.posted[self.run.stage.stage_index, microbatch] = works
            return
        channel.sent.extend(works)
        if channel.reap_after is not None:
            channel.wait_for_sent(len(channel.sent) - channel.reap_after)

    def wait(self, works: list[Any]) -> None:
        try:
            for work in works:
                self._channel.wait(work)
        except RuntimeError as error:
            self._channel.fail(error)

    def drain_send(self, microbatch: int, *, cold: bool) -> None:
        if self.is_done(microbatch):
            return
        stage = self.run.stage
        known = stage._stage_meta
        if self.op is Op.SEND_F:
            stage.fwd_cache[microbatch] = tuple(map(_dummy, known.outputs or ())), []
        else:
            stage.bwd_cache[microbatch] = (None,) * len(known.inputs or ())
        self.post(microbatch)

    def drain_receive(self, microbatch: int, *, cold: bool) -> None:
        if not self.is_done(microbatch):
            self.post(microbatch)

    def is_done(self, microbatch: int) -> bool:
        return (self.op.name, microbatch) in self.run.stage._posted

    def pending(self) -> list[Work]:
        if self.posted is None:
            return []
        mine = [key for key in self.posted if key[0] == self.run.stage.stage_index]
        return [work for key in mine for work in self.posted.pop(key)]

    def left_over(self) -> list[int]:
        return []

    def clear(self) -> None:
        if self.posted is not None:
            self.posted.clear()


class HandRun:
    """One stage of this rank, driven through its own methods."""

    def __init__(self, stage: _PipelineStageBase, program: HandProgram) -> None:
        self.stage, self.program = stage, program
        self.module = stage.submod
        self.inputs = StepInputs()

    def begin(self, inputs: StepInputs) -> None:
        self.inputs = inputs
        stage, setting = self.stage, self.program.setting
        stage.has_backward = setting.grad
        stage.clear_runtime_states()
        stage._in_step = True
        stage._adapter = setting.adapters[stage.stage_index]

    def results(self) -> tuple[list[Tensor], list[Any]]:
        outputs = list(self.stage.output_chunks) if self.inputs.keep_outputs else []
        return list(self.program.context.losses or ()), outputs

    def left_over(self) -> list[str]:
        return []

    def clear(self) -> None:
        self.inputs = StepInputs()

    # -- the actions

    def forward(self, microbatch: int) -> None:
        """F."""
        stage, program = self.stage, self.program
        schedule, context, index = program.schedule, program.context, self.stage.stage_index
        if not stage.is_first and index - 1 not in program.runs:
            self.arrived(Op.RECV_F, microbatch, "its input")
        rng = program.setting.rng
        with nullcontext() if rng is None else rng.at(index, microbatch):
            output = stage.forward_one_chunk(
                microbatch,
                (context.arg_mbs or [])[microbatch],
                (context.kwarg_mbs or [])[microbatch],
                save_forward_output=self.inputs.keep_outputs,
            )
            schedule._maybe_compute_loss(stage, output, context.target_mbs, microbatch, self.inputs.loss_kwargs)
        if index + 1 in program.runs:
            program.hand(index + 1).stage.set_local_fwd_input(output, microbatch)
        elif not stage.has_backward and stage.is_last:
            stage.fwd_cache.pop(microbatch, None)

    def backward(self, microbatch: int, *, full: bool) -> None:
        """B, or I."""
        stage, program, index = self.stage, self.program, self.stage.stage_index
        schedule = program.schedule
        if not stage.is_last and index + 1 not in program.runs:
            self.arrived(Op.RECV_B, microbatch, "the gradient of its output")
        loss = schedule._maybe_get_loss(stage, microbatch)
        last = self.count() if full else False
        stage.backward_one_chunk(microbatch, loss=loss, full_backward=full, last_backward=last)
        if index - 1 in program.runs:
            program.hand(index - 1).stage.set_local_bwd_input(stage.get_local_bwd_output(microbatch), microbatch)

    def backward_weight(self, microbatch: int) -> None:
        """W."""
        self.stage.backward_weight_one_chunk(microbatch, last_backward=self.count())

    def unshard(self) -> None:
        self.program.schedule._unshard(self.stage)

    def reshard(self) -> None:
        self.program.schedule._reshard(self.stage)

    def reduce_grad(self) -> None:
        self.stage.perform_reduce_grad(self.program.schedule._grad_scale_factor)
        self.program.schedule.unsharded_stages.discard(self.stage.stage_index)

    def arrived(self, op: Op, microbatch: int, what: str) -> None:
        """Wait for what this stage needs."""
        index = self.stage.stage_index
        box = self.program.by_op.get((op, index))
        works = None if box is None or box.posted is None else box.posted.pop((index, microbatch), None)
        if box is None or works is None:
            raise RunError(
                f"stage {index}, microbatch {microbatch}: {what} was never received; the order has no receive for it"
            )
        box.wait(works)

    def count(self) -> bool:
        """Count a backward of the stage; whether it was the last."""
        counter, index = self.program.schedule.backward_counter, self.stage.stage_index
        counter[index] += 1
        return counter[index] == self.program.plan.num_microbatches


class HandProgram(Program):
    """One rank's part of an order, bound to the methods of its stages."""

    runs: dict[int, Any]

    def __init__(
        self,
        setting: Setting,
        stages: Sequence[_PipelineStageBase],
        transport: Transport,
        schedule: _PipelineSchedule,
    ) -> None:
        self.schedule = schedule
        self.context = PipelineContext(schedule)
        self.known = False  # whether all ranks know what their messages look like
        self.met = False  # whether they have found out, in this step, or failed to
        self.by_op: dict[tuple[Op, int], HandBox] = {}
        super().__init__(setting, stages, transport)
        self.cold = self.warm

    def _connect(self) -> None:
        self.splits = False
        for index, stage in self.stages.items():
            self.runs[index] = HandRun(stage, self)  # type: ignore[arg-type]

    def hand(self, index: int) -> HandRun:
        run: HandRun = self.runs[index]
        return run

    def message_box(self, action: Action) -> HandBox:
        found = self.by_op.get((action.op, action.stage))
        if found is None:
            peer = self.plan.placement.rank_of(peer_of(action.code))
            found = HandBox(action.op, self.hand(action.stage), self.channel(peer), self)
            self.by_op[action.op, action.stage] = found
        return found

    def boxes(self) -> Any:
        return self.by_op.values()

    # -- around a step

    def open(self, signature: int, *, cold: bool) -> None:
        self.known = self.met = not cold

    def save_layouts(self, signature: int) -> None:
        self.saved = {signature: []}  # the stages remember one shape at a time

    def begin(self, inputs: StepInputs) -> None:
        super().begin(inputs)
        schedule, size = self.schedule, self.plan.num_microbatches
        self.context.arg_mbs = inputs.args if inputs.args is not None else [()] * size
        self.context.kwarg_mbs = inputs.kwargs or [{}] * size
        self.context.target_mbs, self.context.losses = inputs.targets, []
        schedule._begin_step(inputs)
        if not self.met:
            self.meet(inputs)

    def meet(self, inputs: StepInputs | None) -> None:
        """Pass down the stages what their values look like. One that cannot say so fails the step before any message."""
        self.met = True
        problem: BaseException | None = None if inputs is not None else Poisoned()
        handed: Any = None
        for index, stage in sorted(self.stages.items()):
            before, after = self.elsewhere(index - 1), self.elsewhere(index + 1)
            try:
                if before is not None:
                    handed = self.hear(before, stage)
                if problem is None and inputs is not None:
                    self.schedule._prepare_forward(stage, handed, self.context)
                    handed = stage._stage_meta.outputs  # type: ignore[attr-defined]
            except BaseException as caught:  # noqa: BLE001  whatever it is, the stages after this one must hear of it
                problem = problem or caught
            if after is not None and problem is None:
                after.post_described(encode_metas(handed), [])
            elif after is not None:
                after.post_poison()
        try:
            if problem is None and inputs is not None:
                self.schedule._prepare_backward(self.context, inputs.loss_kwargs)
        except BaseException as caught:  # noqa: BLE001
            problem = caught
        self.known = verdict(self.transport, ok=problem is None).fine
        if inputs is not None and not self.known:
            raise problem or Poisoned

    def elsewhere(self, index: int) -> Channel | None:
        """The channel to a stage; None if there is no such stage, or if it sits here."""
        if index in self.stages or not 0 <= index < self.plan.num_stages:
            return None
        return self.channel(self.plan.placement.rank_of(index))

    @staticmethod
    def hear(channel: Channel, stage: Any) -> Any:
        found: list[bytes] = []

        def receive() -> Receiving[None]:
            found.append((yield from channel.receive_description()))

        channel.incoming.append(receive())
        channel.pull()
        return stage._decode_metas(found[0]) if hasattr(stage, "_decode_metas") else None

    def abandon(self) -> None:
        if not self.met:
            self.meet(None)

    def finish(self) -> None:
        self.schedule._update_losses(self.schedule.stages, self.context.losses)
        super().finish()

    def clear(self) -> None:
        super().clear()
        self.schedule._end_step()


class LoopProgram(HandProgram):
    """A loop of the user's own, `_step_microbatches`, in the place of the actions of an order."""

    def __init__(
        self,
        setting: Setting,
        stages: Sequence[_PipelineStageBase],
        transport: Transport,
        schedule: _PipelineSchedule,
    ) -> None:
        super().__init__(setting, stages, transport, schedule)
        idle: Call = lambda: None  # noqa: E731
        self.warm = self.cold = [self.loop, *[idle] * (len(self.actions) - 1)]

    def loop(self) -> None:
        inputs, context = next(iter(self.runs.values())).inputs, self.context
        given = {"losses": context.losses, "return_outputs": inputs.keep_outputs, "loss_kwargs": inputs.loss_kwargs}
        self.schedule._call_own_loop(context.arg_mbs, context.kwarg_mbs, context.target_mbs, given)

    def finish(self) -> None:
        Program.finish(self)


def _dummy(meta: Any) -> Any:
    return None if meta is None else _make_tensor_from_meta(meta, "cpu").zero_()


# -- a handler for each kind of action


def _microbatch(action: Action) -> int:
    if action.microbatch is None:
        raise RunError(f"{action} names no microbatch")
    return action.microbatch


def _forward(program: HandProgram, action: Action, cold: bool) -> Call:
    return partial(program.hand(action.stage).forward, _microbatch(action))


def _backward(program: HandProgram, action: Action, cold: bool) -> Call:
    return partial(program.hand(action.stage).backward, _microbatch(action), full=action.op is Op.B)


def _backward_weight(program: HandProgram, action: Action, cold: bool) -> Call:
    return partial(program.hand(action.stage).backward_weight, _microbatch(action))


def _message(program: HandProgram, action: Action, cold: bool) -> Call:
    return partial(program.message_box(action).post, _microbatch(action))


def _care(program: HandProgram, action: Action, cold: bool) -> Call:
    run = program.hand(action.stage)
    return {Op.UNSHARD: run.unshard, Op.RESHARD: run.reshard, Op.REDUCE_GRAD: run.reduce_grad}[action.op]


HAND_HANDLERS: Handlers = {
    Op.F: _forward,
    Op.B: _backward,
    Op.I: _backward,
    Op.W: _backward_weight,
    **dict.fromkeys(ASK, _message),
    **dict.fromkeys((Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD), _care),
    Overlap: HANDLERS[Overlap],
}


def handled_by(function: Callable[..., object]) -> Callable[[Any, AnyAction, bool], Call]:
    """The handler that calls a user's function."""
    return lambda program, action, cold: partial(function, of_action(action), program.context)
