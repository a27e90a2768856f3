"""Program: one rank's part of a plan, bound once into a flat list of calls.

Peers, boxes and functions are resolved here, so that the loop of a step only calls. There are two lists: `cold`, whose
messages describe themselves, and `warm`, which relies on the layouts that a cold step left (see `penstock.run.layout`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.comm.transport import Transport
from penstock.errors import RunError
from penstock.plan import Action, AnyAction, Op, Overlap, Plan, unpack
from penstock.plan.actions import peer_of
from penstock.run.boxes import Inbox, Outbox
from penstock.run.channel import Channel
from penstock.run.layout import settle
from penstock.run.reaping import reap_points
from penstock.run.rng import MicrobatchRng
from penstock.run.stage_run import StageRun, StepInputs
from penstock.stage.dtensors import mesh_of
from penstock.stage.stage import PipelineStage

Call = Callable[[], object]
_IN_FLIGHT = 2  # sends of a channel that may be on their way before the oldest is waited for


@dataclass(frozen=True)
class Setting:
    """What a program is bound for."""

    plan: Plan  # lowered
    grad: bool  # training, or forward only
    reap: bool  # whether old sends may be waited for before the end: proved for plans that hold with blocking sends
    adapters: Mapping[int, Any]  # data-parallel adapters, by stage
    custom: Mapping[Any, Callable[[AnyAction, Any], object]]  # the user's own functions, by Op or Overlap
    rng: MicrobatchRng | None = None


class Program:
    """One rank's part of a plan, and all that lies between its actions."""

    def __init__(
        self,
        setting: Setting,
        stages: Sequence[PipelineStage],
        transport: Transport,
        *,
        context: Callable[..., Any] | None = None,
    ) -> None:
        self.setting = setting
        self.plan = setting.plan
        self.rank = transport.rank
        self.transport = transport
        self.wait = transport.waiter()
        self.stages = {stage.stage_index: stage for stage in stages}
        self.channels: dict[int, Channel] = {}
        self.inboxes: dict[int, Inbox] = {}
        self.outboxes: dict[tuple[int, int], Outbox] = {}
        self.runs: dict[int, StageRun] = {}
        self.context = context  # makes what custom functions are given, of this program and `cold`
        self.parameters = [p for stage in stages for p in stage.submod.parameters()] if setting.grad else []
        self.saved: dict[int, list[tuple[list[Any], list[Any]]]] = {}  # signature -> layouts
        self.codes = self.plan.codes[self.rank]
        self.actions = tuple(map(unpack, self.codes))
        self._connect()
        self.warm = [self.bind(action, cold=False) for action in self.actions]
        self.cold = [self.bind(action, cold=True) for action in self.actions]
        for position, points in reap_points(self.plan, self.rank).items():
            self.cold[position] = partial(self._then_reap, self.cold[position], points)

    # -- binding

    def _connect(self) -> None:
        """Make the boxes and the stages between them."""
        graph, placement, size = self.plan.graph, self.plan.placement, self.plan.num_microbatches
        split = [(a.stage, a.microbatch) for action in self.actions for a in parts_of(action) if a.op is Op.I]
        self.splits = bool(split)  # whether a backward comes in two parts here
        grad = self.setting.grad
        for stage in self.stages.values():
            for producer in graph.producers(stage.stage_index):
                if producer not in self.inboxes:
                    self.inboxes[producer] = self._inbox(producer, stage)
        for index in self.stages:
            for there in dict.fromkeys(placement.rank_of(c) for c in graph.consumers(index)):
                here = there == self.rank
                self.outboxes[index, there] = Outbox(
                    index,
                    size,
                    channel=None if here else self.channel(there),
                    grad=grad,
                    select=self.selected(index, there),
                    inbox=self.inboxes[index] if here else None,
                )
        for index, stage in self.stages.items():
            self.runs[index] = StageRun(
                stage,
                size,
                inboxes={p: self.inboxes[p] for p in graph.producers(index)},
                outboxes=[box for (producer, _), box in self.outboxes.items() if producer == index],
                grad=grad,
                split=frozenset(m for s, m in split if s == index and m is not None),
                rng=self.setting.rng,
            )

    def _inbox(self, producer: int, stage: PipelineStage) -> Inbox:
        plan = self.plan
        there = plan.placement.rank_of(producer)
        readers = sum(plan.placement.rank_of(c) == self.rank for c in plan.graph.consumers(producer))
        inbox = Inbox(
            producer,
            plan.num_microbatches,
            channel=None if there == self.rank else self.channel(there),
            grad=self.setting.grad,
            readers=readers,
            mesh=partial(mesh_of, stage.submod, stage.get_mesh),
        )
        inbox.places = self.selected(producer, self.rank) or ()
        return inbox

    def selected(self, producer: int, rank: int) -> tuple[int, ...] | None:
        """Which outputs of a stage go to a rank; None: the output as it is. Asked on both ends, answered alike."""
        routes = next(iter(self.stages.values())).routes
        if routes is None:
            return None
        consumers = [c for c in self.plan.graph.consumers(producer) if self.plan.placement.rank_of(c) == rank]
        return routes.wanted_on(producer, consumers)

    def channel(self, peer: int) -> Channel:
        found = self.channels.get(peer)
        if found is None:
            reap_after = _IN_FLIGHT if self.setting.reap else None
            found = self.channels[peer] = Channel(self.transport, peer, self.wait, reap_after=reap_after)
        return found

    def bind(self, action: AnyAction, *, cold: bool) -> Call:
        """The call that does an action: the user's function for its kind, or penstock's own."""
        custom = self.setting.custom.get(Overlap if isinstance(action, Overlap) else action.op)
        if custom is not None and self.context is not None:
            return partial(custom, action, self.context(self, cold=cold))
        return self.default(action, cold=cold)

    def default(self, action: AnyAction, *, cold: bool) -> Call:
        if isinstance(action, Overlap):
            first, second = (self.bind(part, cold=cold) for part in (action.first, action.second))
            return partial(in_series, first, second)
        handler = HANDLERS.get(action.op)
        if handler is None:
            raise RunError(
                f"{action}: nothing here runs {action.op.name} ({action.op.row.word}); expected a plan without it, or a "
                f"function of your own: schedule.register_custom_function(penstock.Op.{action.op.name}, ...)"
            )
        return handler(self, action, cold)

    def _then_reap(self, call: Call, points: list[tuple[int, int]]) -> None:
        call()
        for peer, count in points:
            self.channels[peer].reap(count)

    # -- around a step

    def begin(self, inputs: StepInputs) -> None:
        for run in self.runs.values():
            run.inputs = inputs

    def frozen(self) -> tuple[bool, ...]:
        """Which parameters of this rank need no gradient; what a stage gives may depend on it."""
        return tuple([not parameter.requires_grad for parameter in self.parameters])

    def load_layouts(self, signature: int) -> None:
        """For a warm step."""
        for box, (layouts, grads) in zip(self._boxes(), self.saved[signature], strict=True):
            box.layouts, box.grad_layouts = layouts, grads

    def fresh_layouts(self) -> None:
        """For a cold step."""
        size = self.plan.num_microbatches
        for box in self._boxes():
            box.layouts, box.grad_layouts = [None] * size, [None] * size

    def save_layouts(self, signature: int) -> None:
        self.saved[signature] = [(box.layouts, settle(box.layouts, box.grad_layouts)) for box in self._boxes()]

    def _boxes(self) -> Iterator[Inbox | Outbox]:
        yield from self.inboxes.values()
        yield from self.outboxes.values()

    def finish(self) -> None:
        """Wait for what is on its way."""
        for channel in self.channels.values():
            channel.flush()

    def left_over(self) -> list[str]:
        """What should have been used up and was not."""
        found = []
        for producer, inbox in self.inboxes.items():
            found += [f"input from stage {producer}, microbatch {m}" for m in inbox.left_over()]
        for (stage, rank), outbox in self.outboxes.items():
            found += [f"output of stage {stage} to rank {rank}, microbatch {m}" for m in outbox.left_over()]
        for run in self.runs.values():
            found += run.left_over()
        return found

    def clear(self) -> None:
        for box in self._boxes():
            box.clear()
        for run in self.runs.values():
            run.clear()
        for channel in self.channels.values():
            channel.clear()

    # -- failure

    def message_box(self, action: Action) -> Inbox | Outbox:
        """The box that a message action works on."""
        if action.op in (Op.RECV_F, Op.SEND_B):
            return self.inboxes[peer_of(action.code)]
        return self.outboxes[action.stage, self.plan.placement.rank_of(peer_of(action.code))]


def parts_of(action: AnyAction) -> tuple[Action, ...]:
    return (action.first, action.second) if isinstance(action, Overlap) else (action,)


def microbatch_of(action: Action) -> int:
    assert action.microbatch is not None, f"{action} belongs to no microbatch"
    return action.microbatch


def in_series(first: Call, second: Call) -> None:
    first()
    second()


def nothing() -> None:
    """The call of an action that has nothing to do here."""


# -- a handler for each Op: (program, action, cold) -> the call


def _forward(program: Program, action: Action, cold: bool) -> Call:
    run = program.runs[action.stage]
    checked = cold and run.stage.input_args is not None
    return partial(run.checked_forward if checked else run.forward, microbatch_of(action))


def _backward(program: Program, action: Action, cold: bool) -> Call:
    return partial(program.runs[action.stage].backward, microbatch_of(action))


def _backward_input(program: Program, action: Action, cold: bool) -> Call:
    return partial(program.runs[action.stage].backward_input, microbatch_of(action))


def _backward_weight(program: Program, action: Action, cold: bool) -> Call:
    return partial(program.runs[action.stage].backward_weight, microbatch_of(action))


def _send_forward(program: Program, action: Action, cold: bool) -> Call:
    box: Any = program.message_box(action)
    return partial(box.send_described if cold else box.send, action.microbatch)


def _receive_forward(program: Program, action: Action, cold: bool) -> Call:
    box: Any = program.message_box(action)
    return partial(box.queue if cold else box.post, action.microbatch)


def _send_backward(program: Program, action: Action, cold: bool) -> Call:
    box: Any = program.message_box(action)
    return partial(box.send_described_grads if cold else box.send_grads, action.microbatch)


def _receive_backward(program: Program, action: Action, cold: bool) -> Call:
    box: Any = program.message_box(action)
    return partial(box.queue_grads if cold else box.post_grads, action.microbatch)


def _unshard(program: Program, action: Action, cold: bool) -> Call:
    adapter = program.setting.adapters[action.stage]
    return adapter.unshard if adapter.sharded else nothing


def _reshard(program: Program, action: Action, cold: bool) -> Call:
    adapter = program.setting.adapters[action.stage]
    return adapter.reshard if adapter.sharded else nothing


def _reduce_grad(program: Program, action: Action, cold: bool) -> Call:
    adapter = program.setting.adapters[action.stage]
    return adapter.reduce_grad if adapter.reduces else nothing


HANDLERS: dict[Op, Callable[[Program, Action, bool], Call]] = {
    Op.F: _forward,
    Op.B: _backward,
    Op.I: _backward_input,
    Op.W: _backward_weight,
    Op.SEND_F: _send_forward,
    Op.RECV_F: _receive_forward,
    Op.SEND_B: _send_backward,
    Op.RECV_B: _receive_backward,
    Op.UNSHARD: _unshard,
    Op.RESHARD: _reshard,
    Op.REDUCE_GRAD: _reduce_grad,
}
