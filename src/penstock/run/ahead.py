"""Before the first microbatch: all ranks learn their shapes from runs on placeholders, and compile at the same time.

Without it, ranks compile one after another down the pipeline: each waits for the first activation, and then for the first
gradient. Here descriptions of what stages give travel ahead of the data. Each stage is run on placeholders for what it will be
given (see `penstock.backward.compile_ahead`) and tells the stages after it. A stage that cannot be, tells that, and is compiled
when its first microbatch comes; so are those after it.

Every rank takes part, once for each program, if some rank has a compiled stage: they ask one another before the first step.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.backward.compile_ahead import PartCall, probe_processor, run_on_placeholders
from penstock.comm.framing import Receiving
from penstock.errors import PenstockError
from penstock.nest import Value
from penstock.run.boxes import Inbox, Outbox
from penstock.run.channel import Channel, Poisoned
from penstock.run.layout import Layout, described
from penstock.run.stage_run import StageRun
from penstock.stage.boundary import flatten, unflatten
from penstock.stage.dtensors import layout_of

if TYPE_CHECKING:
    from penstock.run.program import Program

_log = logging.getLogger("penstock")
_UNEXPECTED = "stage %d could not be %s, and is compiled when its first microbatch comes: %s: %s"


class CompileAhead:
    """The runs on placeholders of one program's stages."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.wanted = False  # whether some rank has a compiled stage
        self.done = False
        self.due = False  # in this step, and not over yet
        self.to_send: list[Outbox] = []  # of stages that have not told what they give
        self.to_hear: dict[int, list[Inbox]] = {}  # by rank: what it has not told
        self.layouts: dict[int, Layout | None] = {}  # by producer, of what this rank's stages read; None: nobody knows
        self.calls: list[tuple[int, PartCall]] = []  # of compiled parts, by stage

    def open(self) -> None:
        """A step begins in which messages describe themselves."""
        if not self.wanted or self.done:
            return
        self.done = self.due = True
        program = self.program
        self.to_send = [program.outboxes[key] for key in sorted(program.outboxes)]
        for _, inbox in sorted(program.inboxes.items()):
            if inbox.channel is not None:
                self.to_hear.setdefault(inbox.channel.peer, []).append(inbox)

    def run(self) -> None:
        """Tell and hear, then compile what is here."""
        compiled = [run.compiled for run in self.program.runs.values() if run.compiled is not None]
        if self.program.transport.device.type == "cpu" and any(one.is_inductor for one in compiled):
            probe_processor()
        for index in sorted(self.program.runs):
            self.rehearse(self.program.runs[index])
        self.program.finish()
        self.due = False
        calls, self.calls, self.layouts = self.calls, [], {}
        if calls:
            stages = ", ".join(str(index) for index, run in self.program.runs.items() if run.compiled is not None)
            _log.info("rank %d compiles stage %s", self.program.rank, stages)
            began = time.perf_counter()
            for index, call in calls:
                if (error := call.compile()) is not None:
                    _log.warning(_UNEXPECTED, index, "compiled ahead", type(error).__name__, error)
            _log.info("rank %d has compiled stage %s in %.1f s", self.program.rank, stages, time.perf_counter() - began)

    def abandon(self) -> None:
        """The step has failed here: the other ranks still wait to be told, and tell."""
        self.due = False
        for outbox in self.to_send[:]:
            with suppress(RuntimeError, PenstockError):
                self.tell(outbox, None)
        for peer, inboxes in self.to_hear.items():
            with suppress(RuntimeError, PenstockError):
                while inboxes:
                    self.hear(self.program.channels[peer])
        with suppress(RuntimeError, PenstockError):
            self.program.finish()
        self.calls, self.layouts = [], {}

    def rehearse(self, run: StageRun) -> None:
        found: tuple[Value, list[PartCall]] | None = None
        for inbox in run.inboxes:
            while inbox.producer not in self.layouts:
                assert inbox.channel is not None, "stages of this rank come in their order"
                self.hear(inbox.channel)
        if all(self.layouts[inbox.producer] is not None for inbox in run.inboxes):
            try:
                # Hooks gather parameters, or spread tensors over a mesh, and are left out of a run on placeholders.
                sharded = self.program.setting.adapters[run.stage.stage_index].sharded
                if not sharded and all(layout_of(parameter) is None for parameter in run.module.parameters()):
                    run.rehearsed = True
                    found = run_on_placeholders(run.inner, run.compiled, *self.arguments(run))
            except Exception as error:  # noqa: BLE001  it may run with data, and if not, the first microbatch tells
                _log.warning(_UNEXPECTED, run.stage.stage_index, "run on placeholders", type(error).__name__, error)
        for outbox in run.outboxes:
            self.tell(outbox, found)
        if found is not None:
            self.calls += [(run.stage.stage_index, call) for call in found[1]]

    def arguments(self, run: StageRun) -> tuple[tuple[Value, ...], dict[str, Value]]:
        """What the stage will be called with for the first microbatch: what this rank has itself, and zeros."""
        device = self.program.transport.device
        copies, run.given.copies = run.given.copies, False
        try:
            for inbox in run.inboxes:
                layout = self.layouts[inbox.producer]
                assert layout is not None and layout.spec is not None, "only what is known is made up"  # noqa: PT018
                known = [tensor for tensor in layout.tensors if tensor is not None]
                leaves = [t.zeros(device).requires_grad_(t.requires_grad and inbox.grad) for t in known]
                inbox.arrived[0], inbox.values[0] = leaves, unflatten(layout.spec, leaves)
            return run.arguments(0)
        finally:
            run.given.copies = copies
            for inbox in run.inboxes:
                inbox.arrived[0] = inbox.values[0] = None

    # -- messages

    def tell(self, outbox: Outbox, found: tuple[Value, list[PartCall]] | None) -> None:
        """What a stage gives to the stages of one rank, or that nobody knows."""
        self.to_send.remove(outbox)
        layout = None
        if found is not None:
            with suppress(PenstockError):
                tensors, spec = flatten(outbox.chosen(found[0]))
                if all(layout_of(tensor) is None for tensor in tensors):  # else others would have to know a mesh
                    layout = Layout.of(tensors, spec, ordered=outbox.ordered)
        if outbox.inbox is not None:
            self.layouts[outbox.stage] = layout
        else:
            outbox.channel.post_described(None if layout is None else layout.encode())

    def hear(self, channel: Channel) -> None:
        """What a rank tells next."""
        inbox = self.to_hear[channel.peer].pop(0)
        self.layouts[inbox.producer] = None
        with suppress(Poisoned):
            tensors, nest = described(hear_description(channel))
            with suppress(PenstockError):
                self.layouts[inbox.producer] = Layout.decode(tensors, nest)


def hear_description(channel: Channel) -> bytes:
    """What a rank tells next, beside the messages of the plan."""
    heard: list[bytes] = []

    def receive() -> Receiving[None]:
        heard.append((yield from channel.receive_description()))

    channel.incoming.append(receive())
    channel.pull()
    return heard[0]
