"""Programs: what a schedule runs on this rank, by mode and number of microbatches, bound when it is first needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.backward.compile_stage import compile_once
from penstock.comm.transport import Transport
from penstock.errors import DeadlockError
from penstock.lower import Ahead, Early, InTurn, ReceivePolicy, add_reduce_grad, add_unshard_reshard, lower
from penstock.lower.lower import Care, lower_shares
from penstock.parallel import DataParallel, adapt, unwrap
from penstock.plan import Op, Plan, check
from penstock.plan.disable_gc import no_collecting
from penstock.run.handlers import HANDLERS
from penstock.run.program import Program
from penstock.run.setting import Binding, Setting
from penstock.run.ties import Ties
from penstock.stage.pipeline_stage import PipelineStage

BLOCKING_FORWARDS_DEADLOCK = frozenset({"loopedbfs"})  # forward only, with receives two ahead
TRAIN, FORWARD = 0, 1  # modes: a training step, or an evaluation


def runs_with_blocking_sends(plan: Plan) -> bool:
    """Prove that a lowered plan is right, and find out whether a rank may stay in a send until it is received.

    If not it runs all the same, since sends are asynchronous; only nothing may wait for one before the end. For plans of a
    family both is known (`Plan.is_share`).
    """
    if plan.is_share:
        return plan.has_backward or plan.name not in BLOCKING_FORWARDS_DEADLOCK
    check(plan)
    try:
        check(plan, sends="blocking")
    except DeadlockError:
        return False
    return True


class Programs:
    """The programs of this rank, by mode and number of microbatches; each is bound when it is first needed, and kept.

    programs = Programs(plan, stages, transport, Binding(), ties)
    programs.get(TRAIN)                # all microbatches of the plan; lowered, proved and bound by now
    programs.get(TRAIN, 3)             # the first three
    """

    program = Program

    def __init__(
        self, plan: Plan, stages: Sequence[PipelineStage], transport: Transport, binding: Binding, ties: Ties
    ) -> None:
        self.plan, self.stages, self.transport, self.binding = plan, stages, transport, binding
        self.ties = ties  # parameters that several stages share
        self.compile_ahead = False  # whether some rank has a compiled stage
        self.bound: dict[tuple[int, int], Program] = {}
        for stage in stages:
            compile_once(stage, unwrap(stage.submod))

    def get(self, mode: int, count: int | None = None) -> Program:
        most = self.plan.num_microbatches
        key = mode, most if count is None else min(count, most)
        if key not in self.bound:
            self.bound[key] = self.bind(*key)
        return self.bound[key]

    def bind(self, mode: int, count: int) -> Program:
        adapters = self.adapters()
        with no_collecting():
            plan = self.lowered(mode, adapters, count)
            return self.program(self.proved(plan, adapters, grad=mode == TRAIN), self.stages, self.transport)

    def current(self, mode: int, count: int) -> Program:
        """Return the program for the modules that the stages hold now; what is known of messages stays."""
        program = self.get(mode, count)
        if any(run.module is not run.stage.submod for run in program.runs.values()):
            old, key = program, (mode, program.plan.num_microbatches)
            program = self.bound[key] = self.bind(*key)
            program.saved, program.signatures, program.ahead.done = old.saved, old.signatures, old.ahead.done
        program.ahead.wanted = self.compile_ahead
        return program

    def adapters(self) -> dict[int, DataParallel]:
        """The data parallelism of each stage."""
        return {stage.stage_index: adapt(stage.submod) for stage in self.stages}

    def lowered(self, mode: int, adapters: Mapping[int, DataParallel], count: int | None = None) -> Plan:
        """The plan of a mode with its messages, and with what the data parallelism of the stages needs."""
        plan = self.plan
        if count is not None and count < plan.num_microbatches:
            plan = plan.of_first(count)
        if mode != TRAIN:
            plan = plan.forward_only()
        shards = any(adapter.sharded for adapter in adapters.values()) and not plan.has(Op.UNSHARD)
        reduces = mode == TRAIN and any(one.reduces for one in adapters.values()) and not plan.has(Op.REDUCE_GRAD)
        if plan.is_lowered:
            plan = add_unshard_reshard(plan) if shards else plan
            return add_reduce_grad(plan) if reduces else plan
        default: ReceivePolicy = Early() if mode == TRAIN else Ahead(2)
        if self.transport.queues != "direction":
            default = InTurn(self.transport.queues)
        elif plan.is_share and self.binding.receives in (None, default):
            return lower_shares(plan, receives=default, care=Care(shards, reduce=reduces))
        receives = default if self.binding.receives is None else self.binding.receives
        return lower(plan, receives=receives, shards=shards, reduce=reduces)

    def proved(self, plan: Plan, adapters: Mapping[int, DataParallel], *, grad: bool) -> Setting:
        """A lowered plan that cannot go wrong, and what its actions are done with."""
        reap = runs_with_blocking_sends(plan)
        if self.transport.queues != "direction":
            check(plan, queues=self.transport.queues)
        return Setting(**vars(self.binding), plan=plan, grad=grad, reap=reap, adapters=adapters, handlers=HANDLERS)
