"""Program: one rank's part of a plan, bound once into a flat list of calls.

Peers, boxes and functions are resolved here, so that the loop of a step only calls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

from penstock.batch.batch import Batch
from penstock.comm.messages import Work
from penstock.comm.transport import Transport
from penstock.errors import RunError
from penstock.observe.observer import StepObserver
from penstock.plan import Action, AnyAction, Op, Overlap, unpack
from penstock.plan.actions import peer_of
from penstock.run.ahead import CompileAhead
from penstock.run.boxes import Inbox, Layouts, Outbox
from penstock.run.channel import Channel, Wait
from penstock.run.layout import settle
from penstock.run.setting import ActionKind, Call, Setting
from penstock.run.stage_run import StageRun
from penstock.stage.dtensors import mesh_of
from penstock.stage.pipeline_stage import PipelineStage

if TYPE_CHECKING:
    from penstock.run.schedule import Schedule

_IN_FLIGHT = 2  # sends of a channel that may be on their way before the oldest is waited for
Box: TypeAlias = Inbox | Outbox


class Program:
    """One rank's part of a plan, and all that lies between its actions."""

    stage_run = StageRun  # what does the actions of a stage
    number = 0  # training steps done before this one
    is_cold = True  # whether messages of this step describe themselves

    def __init__(self, setting: Setting, stages: Sequence[PipelineStage], transport: Transport) -> None:
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
        self.parameters = [p for stage in stages for p in stage.submod.parameters()] if setting.grad else []
        self.saved: dict[int, list[Layouts]] = {}  # by signature, for each box
        self.signatures: dict[Hashable, int] = {}  # a number for each shape of input, last used last
        self.codes = self.plan.codes[self.rank]
        self.actions = tuple(map(unpack, self.codes))
        self._connect()
        self.ahead = CompileAhead(self)
        self.calls = [self.bind(action) for action in self.actions]

    # -- binding

    def _connect(self) -> None:
        """Make the boxes and the stages between them."""
        graph, placement, size = self.plan.graph, self.plan.placement, self.plan.num_microbatches
        parts = [part for action in self.actions for part in parts_of(action) if part.op in (Op.I, Op.R, Op.O)]
        self.splits = any(part.op is Op.I for part in parts)  # whether a backward comes in two parts here
        grad = self.setting.grad
        for stage in self.stages.values():
            for producer in graph.producers(stage.stage_index):
                if producer not in self.inboxes:
                    self.inboxes[producer] = self._inbox(producer, stage)
        for index in self.stages:
            for there in dict.fromkeys(placement.rank_of(c) for c in graph.consumers(index)):
                here = there == self.rank
                box = Outbox(index, size, None if here else self.channel(there), grad=grad)
                box.ordered = self.setting.rng is not None
                box.select, box.inbox = self.selected(index, there), self.inboxes[index] if here else None
                self.outboxes[index, there] = box
        for index, stage in self.stages.items():
            self.runs[index] = self.stage_run(
                stage,
                self.setting,
                inboxes=[self.inboxes[p] for p in graph.producers(index)],
                outboxes=[box for (producer, _), box in self.outboxes.items() if producer == index],
                chosen=[(part.op, part.microbatch) for part in parts if part.stage == index],
            )

    def _inbox(self, producer: int, stage: PipelineStage) -> Inbox:
        plan = self.plan
        there = plan.placement.rank_of(producer)
        channel = None if there == self.rank else self.channel(there)
        inbox = Inbox(producer, plan.num_microbatches, channel, grad=self.setting.grad)
        inbox.readers = sum(plan.placement.rank_of(c) == self.rank for c in plan.graph.consumers(producer))
        inbox.mesh = partial(mesh_of, stage.submod, stage.get_mesh)
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
        if peer not in self.channels:
            reap_after = _IN_FLIGHT if self.setting.reap else None
            self.channels[peer] = Channel(self.transport, peer, self.wait, reap_after=reap_after)
        return self.channels[peer]

    def bind(self, action: AnyAction) -> Call:
        """The call that does an action: by the user's handler for its kind, or by penstock's own."""
        custom = self.setting.custom.get(kind_of(action))
        return self.default(action) if custom is None else custom(self, action)

    def default(self, action: AnyAction) -> Call:
        handler = self.setting.handlers.get(kind_of(action))
        if handler is None:
            op = parts_of(action)[0].op
            raise RunError(
                f"{action}: nothing here runs {op.name} ({op.row.word}); expected a plan without it, or a function of your "
                f"own: schedule.register_custom_function(penstock.Op.{op.name}, ...)"
            )
        return handler(self, action)

    def observed(self, observers: Sequence[StepObserver]) -> list[Call]:
        """Return the calls of a step so that the observers see them, and the waits inside them, until `unobserved`."""
        for channel in self.channels.values():
            channel.wait = partial(_observed_wait, observers, self.wait)
        return [partial(_observed, observers, at, call) for at, call in enumerate(self.calls)]

    def unobserved(self) -> None:
        for channel in self.channels.values():
            channel.wait = self.wait

    def buffered_bytes(self) -> int:
        """Return the bytes between actions: receives that are posted or have arrived, gradients of boundary values.

        An input whose gradient is there waits for that to be sent, and counts with it.
        """
        found: list[Tensor | None] = []
        for inbox in self.inboxes.values():
            for leaves, works in zip(inbox.arrived, inbox.works, strict=True):
                done = [leaf for leaf in leaves or () if leaf.is_leaf and leaf.grad is not None]
                found += (leaves or ()) if works is not None else [leaf.grad for leaf in done]
                found += done if inbox.channel is not None else ()
        for outbox in self.outboxes.values():
            found += [tensor for buffers in outbox.arrived for tensor in buffers or ()]
        return sum(tensor.nbytes for tensor in found if tensor is not None)

    # -- around a step

    def begin(self, batch: Batch, number: int, *, uneven: bool) -> None:
        """The first thing in a step that all ranks are about to run; what goes wrong here fails the step everywhere.

        `number`: training steps done before; `uneven`: input and target have different numbers of rows.
        """
        self.number = number
        for run in self.runs.values():
            run.begin(batch, number, uneven=uneven)
        if self.ahead.due:
            self.ahead.run()

    @property
    def compiles(self) -> bool:
        """Whether torch.compile has compiled something here."""
        return any(run.compiled is not None for run in self.runs.values())

    def frozen(self) -> tuple[bool, ...]:
        """Which parameters of this rank need no gradient; what a stage gives may depend on it."""
        return tuple([not parameter.requires_grad for parameter in self.parameters])

    def open(self, signature: int, *, cold: bool) -> None:
        """Before the messages of a step: a warm one knows what they look like, a cold one finds out."""
        self.is_cold = cold
        for run in self.runs.values():
            run.checks_input = cold and run.stage.input_args is not None
        if cold:
            self.ahead.open()
        for place, box in enumerate(self.boxes()):
            box.incoming, box.outgoing = box.unknown() if cold else self.saved[signature][place]

    def save_layouts(self, signature: int) -> None:
        self.saved[signature] = [
            (settle(box.outgoing, box.incoming), settle(box.incoming, box.outgoing)) for box in self.boxes()
        ]

    def boxes(self) -> Sequence[Box]:
        return *self.inboxes.values(), *self.outboxes.values()

    def finish(self) -> None:
        """Wait for what is on its way."""
        for channel in self.channels.values():
            channel.flush()

    def left_over(self) -> list[str]:
        """What should have been used up and was not."""
        names = [f"input from stage {producer}" for producer in self.inboxes]
        names += [f"output of stage {stage} to rank {rank}" for stage, rank in self.outboxes]
        found = [
            f"{name}, microbatch {m}" for name, box in zip(names, self.boxes(), strict=False) for m in box.left_over()
        ]
        return found + [one for run in self.runs.values() for one in run.left_over()]

    def clear(self) -> None:
        for one in (*self.boxes(), *self.runs.values(), *self.channels.values()):
            one.clear()

    # -- failure

    def abandon(self) -> None:
        """The step has failed here, perhaps before `begin`: meet the other ranks wherever that would have met them."""
        if self.ahead.due:
            self.ahead.abandon()

    def message_box(self, action: Action) -> Box:
        """The box that a message action works on."""
        peer = peer_of(action.code)
        if action.op in (Op.RECV_F, Op.SEND_B):
            return self.inboxes[peer]
        return self.outboxes[action.stage, self.plan.placement.rank_of(peer)]


def _observed(observers: Sequence[StepObserver], at: int, call: Call) -> None:
    entered, failed = 0, True
    try:
        for observer in observers:
            observer.before_action(at)
            entered += 1
        call()
        failed = False
    finally:
        for observer in reversed(observers[:entered]):
            observer.after_action(at, failed=failed)


def _observed_wait(observers: Sequence[StepObserver], wait: Wait, work: Work) -> None:
    wait(work)
    for observer in observers:
        observer.waited()


CustomFunction: TypeAlias = Callable[[AnyAction, "ActionContext"], object]


class ActionContext:
    """What a user's function for a kind of action is given beside the action.

    def overlapped(action, context):
        context.run(action.first)
        context.run(action.second)

    schedule.register_custom_function(Overlap, overlapped)
    """

    def __init__(self, schedule: Schedule, program: Program) -> None:
        self.schedule = schedule
        self._program = program

    @property
    def cold(self) -> bool:
        """Whether messages of this step describe themselves; see `penstock.run.layout`."""
        return self._program.is_cold

    def stage(self, index: int) -> PipelineStage:
        """A stage of this rank."""
        return self._program.stages[index]

    @property
    def inputs(self) -> Batch:
        """The microbatches of this step: `args`, `kwargs`, `targets`."""
        return next(iter(self._program.runs.values())).inputs

    def run(self, action: AnyAction) -> None:
        """Do an action as penstock does it; messages of the step included."""
        self._program.default(action)()


def kind_of(action: AnyAction) -> ActionKind:
    return Overlap if isinstance(action, Overlap) else action.op


def parts_of(action: AnyAction) -> tuple[Action, ...]:
    return (action.first, action.second) if isinstance(action, Overlap) else (action,)
