"""Steps through the stages' own methods: another table of handlers for the loop that everybody's steps go through.

penstock's own handlers never look at a stage's methods. Where a program overrides them (a stage with its own
`forward_one_chunk`, a function for OVERLAP_F_B that moves tensors itself) the actions are done by the handlers here, in the
words of torch.distributed.pipelining. What is around the actions is the same for all: preamble, verdict, ties, random
numbers, recording, and what happens when a rank fails. Every rank goes the same way: they ask one another before the first step.

Messages are what the stage says (`get_fwd_send_ops` and its kin), so both ends must know what they look like: a cold step
begins with passing that down the stages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.backward.engine_protocol import Output
from penstock.batch.batch import Batch
from penstock.comm.transport import Transport
from penstock.compat._hand_stage import HandBox, HandRun, PipelineContext
from penstock.compat._orders import OPS, of_action
from penstock.compat._siblings import is_overridden
from penstock.compat._stage_base import _PipelineStageBase
from penstock.compat._utils import Metas
from penstock.compat.stage import PipelineStage
from penstock.errors import StageError
from penstock.nest import Value
from penstock.plan import Action, AnyAction, Op, Overlap
from penstock.plan.actions import peer_of
from penstock.run.ahead import hear_description
from penstock.run.binding import TRAIN, Programs
from penstock.run.channel import Channel, Poisoned
from penstock.run.handlers import HANDLERS, nothing
from penstock.run.preamble import verdict
from penstock.run.program import Program
from penstock.run.setting import Call, Handlers, Setting
from penstock.run.stage_run import StageRun

if TYPE_CHECKING:
    from penstock.compat._schedule import _PipelineSchedule

HAND = 2  # added to a mode: through the stages' own methods
MEET = 4  # added to both: nothing but what comes before the first microbatch
HOOKS = (
    *("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"),
    *("forward_maybe_with_nosync", "backward_maybe_with_nosync", "scale_grads", "perform_reduce_grad"),
    *("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"),
    *("set_local_fwd_input", "set_local_bwd_input", "get_local_bwd_output"),
    *("_prepare_forward_infra", "_prepare_backward_infra", "clear_runtime_states"),
    *("_get_recv_ops", "_retrieve_recv_activations", "_retrieve_recv_grads"),
    *("_create_act_recv_info", "_create_act_send_info", "_create_grad_recv_info", "_create_grad_send_info"),
    *("_setup_forward_recv_info", "_setup_forward_send_info", "_setup_backward_recv_info"),
)
"""Methods that programs override, in a subclass or on an object, to take part in a step."""


def is_driven_by_hand(stage: object) -> bool:
    """Whether a step has to go through the stage's own methods: some of them are the user's."""
    kind = isinstance(stage, _PipelineStageBase)
    return kind and (not isinstance(stage, PipelineStage) or is_overridden(stage, *HOOKS))


class HandProgram(Program):
    """One rank's part of an order, bound to the methods of its stages."""

    runs: dict[int, HandRun]  # type: ignore[assignment]  # all of them are
    stages: dict[int, _PipelineStageBase]  # type: ignore[assignment]  # likewise

    def __init__(
        self, setting: Setting, stages: Sequence[_PipelineStageBase], transport: Transport, schedule: _PipelineSchedule
    ) -> None:
        self.schedule = schedule
        self.context = PipelineContext(schedule)
        self.known = False  # whether all ranks know what their messages look like
        self.met = False  # whether they have found out, in this step, or failed to
        self.by_op: dict[tuple[Op, int], HandBox] = {}
        super().__init__(setting, stages, transport)

    def _connect(self) -> None:
        self.splits = False
        self.runs = {index: HandRun(stage, self) for index, stage in self.stages.items()}

    def message_box(self, action: Action) -> HandBox:  # type: ignore[override]  # which is used in the same way
        key = action.op, action.stage
        if key not in self.by_op:
            peer = self.plan.placement.rank_of(peer_of(action.code))
            self.by_op[key] = HandBox(action.op, self.runs[action.stage], self.channel(peer), self)
        return self.by_op[key]

    def boxes(self) -> Sequence[HandBox]:  # type: ignore[override]
        return tuple(self.by_op.values())

    # -- around a step

    def open(self, signature: int, *, cold: bool) -> None:
        self.known = self.met = not cold

    def save_layouts(self, signature: int) -> None:
        self.saved = {signature: []}  # the stages remember one shape at a time

    def begin(self, batch: Batch, number: int, *, uneven: bool) -> None:
        super().begin(batch, number, uneven=uneven)
        schedule, size = self.schedule, self.plan.num_microbatches
        self.context.arg_mbs = batch.args if batch.args is not None else [()] * size
        self.context.kwarg_mbs = batch.kwargs or [{}] * size
        self.context.target_mbs, self.context.losses = batch.targets, []
        schedule._begin_step(batch)
        if not self.met:
            self.meet(batch)

    def meet(self, inputs: Batch | None) -> None:
        """Pass down the stages what their values look like. One that cannot say so fails the step before any message."""
        self.met = True
        schedule = self.schedule
        problems: list[BaseException] = [] if inputs is not None else [Poisoned()]
        known: Mapping[int, Metas | None] = {}  # what the outputs of this rank's stages look like
        with noted(problems):
            if not problems:
                schedule._warmup_p2p(schedule.stages, self.setting.grad, bool(self.saved))
        for index, stage in sorted(self.stages.items()):
            before, after = self.elsewhere(index - 1), self.elsewhere(index + 1)
            with noted(problems):
                stage._heard = known if before is None else stage._told(hear_description(before))
                if not problems:
                    schedule._prepare_forward(stage, stage._heard.get(index - 1), self.context)
                    known = {**stage._heard, index: stage._stage_meta.outputs}
            if after is not None:
                after.post_described(None if problems else stage._describe())
        with noted(problems):
            if inputs is not None and not problems:
                schedule._prepare_backward(self.context, inputs.loss_kwargs)
        self.known = verdict(self.transport, ok=not problems).fine
        if inputs is not None and not self.known:
            raise problems[0] if problems else Poisoned

    def elsewhere(self, index: int) -> Channel | None:
        """The channel to a stage; None if there is no such stage, or if it sits here."""
        if index in self.stages or not 0 <= index < self.plan.num_stages:
            return None
        return self.channel(self.plan.placement.rank_of(index))

    def abandon(self) -> None:
        if not self.met:
            self.meet(None)

    def finish(self) -> None:
        self.schedule._update_losses(self.schedule.stages, self.context.losses)
        super().finish()

    def clear(self) -> None:
        super().clear()
        self.schedule._end_step()


@contextmanager
def noted(problems: list[BaseException]) -> Iterator[None]:
    """Note what goes wrong instead of raising it: whatever it is, the other ranks must hear of it first."""
    try:
        yield
    except BaseException as caught:  # noqa: BLE001
        problems.append(caught)


class LoopProgram(HandProgram):
    """A loop of the user's own, `_step_microbatches`, in the place of the actions of an order."""

    def bind(self, action: AnyAction) -> Call:
        return self.loop if action is self.actions[0] else nothing

    def loop(self) -> None:
        inputs, context = next(iter(self.runs.values())).inputs, self.context
        step: Callable[..., object] = self.schedule._step_microbatches
        given = {"losses": context.losses, "return_outputs": inputs.keep_outputs, "loss_kwargs": inputs.loss_kwargs}
        options = given.keys() & inspect.signature(step).parameters.keys()
        step(context.arg_mbs, context.kwarg_mbs, context.target_mbs, **{name: given[name] for name in options})

    def finish(self) -> None:
        Program.finish(self)


class MeetingProgram(LoopProgram):
    """A step that ends when the stages know what their values look like."""

    def loop(self) -> None:
        """Nothing is left to do."""

    def begin(self, batch: Batch, number: int, *, uneven: bool) -> None:
        super().begin(batch, number, uneven=uneven)
        self.known = False  # there will be no messages

    def save_layouts(self, signature: int) -> None:
        """Nothing: whoever asks again has new shapes."""


def _care(program: HandProgram, action: Action) -> Call:
    run = program.runs[action.stage]
    return {Op.UNSHARD: run.unshard, Op.RESHARD: run.reshard, Op.REDUCE_GRAD: run.reduce_grad}[action.op]


HAND_HANDLERS: Handlers = {**HANDLERS, **dict.fromkeys((Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD), _care)}
"""Penstock's own, which find other stage runs and other boxes in the program; only care of parameters is another matter."""


def handled_by(function: Callable[..., object]) -> Callable[[HandProgram, AnyAction], Call]:
    """The handler that calls a user's function."""
    return lambda program, action: partial(function, of_action(action), program.context)


class ValidatedRun(StageRun):
    """A stage of penstock's own steps, which notes what its tensors look like, and compares them if a program asks for that."""

    def call(self, microbatch: int, args: tuple[Value, ...], kwargs: dict[str, Value]) -> Output:
        if isinstance(self.stage, _PipelineStageBase) and self.stage._runtime_validate:
            self.stage._validate_seen("forward inputs", microbatch, args)
        return super().call(microbatch, args, kwargs)

    def returned(self, microbatch: int, args: tuple[Value, ...], value: Value) -> None:
        stage = self.stage
        if not isinstance(stage, _PipelineStageBase):
            return
        if stage._runtime_validate:
            stage._validate_seen("forward outputs", microbatch, value)
        if stage._stage_meta.inputs is None:
            stage._note(args, value)


class ValidatedProgram(Program):
    """Penstock's own, for stages of this package."""

    stage_run = ValidatedRun


class HandPrograms(Programs):
    """Beside penstock's own programs, those that drive the stages by hand."""

    program = ValidatedProgram

    def __init__(self, schedule: _PipelineSchedule) -> None:
        super().__init__(schedule.plan, schedule.stages, schedule._transport, schedule._binding, schedule._ties)
        self.schedule = schedule

    def bind(self, mode: int, count: int) -> Program:
        if mode < HAND:
            return super().bind(mode, count)
        schedule = self.schedule
        for stage in self.stages:
            if not isinstance(stage, _PipelineStageBase):
                raise StageError(
                    f"{stage!r} is driven by hand, because another stage or a function of yours is; make it with "
                    "penstock.compat.PipelineStage"
                )
        plan = schedule._hand_plan()
        trains = mode in (HAND + TRAIN, HAND + MEET + TRAIN)
        setting = self.proved(plan if trains else plan.forward_only(), self.adapters(), grad=trains)
        custom = {OPS.get(kind, Overlap): handled_by(function) for kind, function in schedule._hand_functions.items()}
        setting = replace(setting, handlers=HAND_HANDLERS, custom=custom)
        loops = is_overridden(schedule, "_step_microbatches")
        program = MeetingProgram if mode >= MEET else LoopProgram if loops else HandProgram
        return program(setting, self.stages, self.transport, schedule)  # type: ignore[arg-type]
