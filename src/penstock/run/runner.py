"""Runner: the steps of one rank. A step succeeds on every rank or raises on every rank, and the next one works."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import astuple, replace
from threading import get_ident
from typing import TYPE_CHECKING, NamedTuple

import torch

from penstock.batch.batch import Batch, Rows, Weights
from penstock.comm.transport import Transport
from penstock.errors import (
    DeviceFailed,
    OutOfMemory,
    PeerFailed,
    RanksDisagree,
    RunError,
    TransportError,
)
from penstock.health.failure import FailureRecord
from penstock.nest import Value
from penstock.observe.action_hooks import ProfilerRanges, WaitForDevice, profiler_runs
from penstock.observe.observer import StepObserver
from penstock.plan import Action, AnyAction
from penstock.run.channel import Poisoned
from penstock.run.checksums import Checksums, Comparison, difference, joined
from penstock.run.draining import drain, explained, meet_replicas
from penstock.run.lookout import Position
from penstock.run.preamble import FAILED, Preamble, Preambles, verdict
from penstock.run.program import Program, parts_of
from penstock.run.ties import Ties
from penstock.stage.held import is_out_of_memory
from penstock.stage.intercept import intercepted

if TYPE_CHECKING:
    from penstock.run.binding import Programs

_BLOCKING = "PENSTOCK_BLOCKING"  # in the environment: each action waits for the device
_REMEMBERED = 64  # shapes of input whose layouts are kept


class _Heard(Exception):
    """Another rank has failed: stop computing."""


class Outcome(NamedTuple):
    """Results of a step, on the rank of the last stage; empty on others."""

    losses: list[torch.Tensor] = []  # noqa: RUF012  by microbatch; never changed
    outputs: list[Value] = []  # noqa: RUF012  likewise, if they are kept
    shares: Weights | None = None  # of the losses in that of the batch; None: they add up


class Runner:
    """Runs programs, one for each mode, over one transport."""

    def __init__(
        self,
        transport: Transport,
        preambles: Preambles,
        *,
        dynamic: bool,
        observers: list[StepObserver],
        comparison: Comparison | None,
    ) -> None:
        self.transport, self.preambles, self.comparison = transport, preambles, comparison
        self.dynamic = dynamic  # every step is cold: for models whose shapes change for reasons of their own
        self.observers = observers  # the schedule adds and removes them between steps
        self.position = transport.position = Position(transport.rank)
        blocking = os.environ.get(_BLOCKING, "0") != "0" and transport.device.type != "cpu"
        self.hooks: list[StepObserver] = [WaitForDevice(transport)] if blocking else []
        self._fine = False  # whether the current step went well, as all ranks found
        self._record: FailureRecord | None = None  # of this step: what was reported here, or stood before that

    def step(self, programs: Programs, mode: int, batch: Batch, number: int) -> Outcome:
        """One step: it succeeds on all ranks, or raises on all ranks and leaves nothing in flight.

        `number`: training steps done before.
        """
        mine = programs.current(mode, batch.count)
        with self._parallelism(mine, programs.ties if batch.train else None) as problem, self._epoch(mine):
            given = batch.error or problem
            preamble, error = self.tell(mine, mode, batch, given)
            # As announced, so that messages match.
            program = programs.get(preamble.mode, preamble.num_microbatches)
            certain = given is not None or (error is not None and not preamble.failed)
            if preamble.failed:
                meet_replicas(mine, mine.actions)
            else:
                program.open(preamble.signature, cold=bool(preamble.cold))
                if error is None:
                    error = self.run(program, batch, number, uneven=_uneven(batch.rows, preamble))
                else:
                    drain(program, 0)
            return self.conclude(program, error, preamble, certain=certain)

    @contextmanager
    def _epoch(self, program: Program) -> Iterator[None]:
        """Begin and end a step for the transport, and for those who look where this rank is."""
        self._fine, self._record = False, None
        self.transport.begin_step()
        position = self.transport.position = self.position
        position.step, position.at, position.thread = self.transport.epoch, -1, get_ident()
        position.program = program
        try:
            yield
        finally:
            position.program = self.transport.awaited = None
            self._release_replicas(program)  # before connections are ended, for which a device may take its time
            self.transport.end_step(fine=self._fine)
            self._release_replicas(program)

    def _release_replicas(self, program: Program) -> None:
        """Where this pipeline cannot be used until the job is started again, replicas need not wait for it."""
        if self.transport.unusable is not None:
            for adapter in program.setting.adapters.values():
                adapter.give_up(self.transport.unusable)

    @contextmanager
    def _parallelism(self, program: Program, ties: Ties | None) -> Iterator[BaseException | None]:
        """Begin and end a step for replicas and tied parameters; an error of the beginning is the step's.

        However the step ends, data parallelism goes on as before, and `.grad` of tied parameters of a failed step is restored.
        """
        adapters, problem, failed = program.setting.adapters.values(), None, True
        try:
            try:
                for adapter in adapters:
                    adapter.begin()  # first: replicas that have begun are met, and told, if something is wrong here
                if ties is not None:
                    ties.begin()
            except BaseException as error:  # noqa: BLE001  whatever it is, the other ranks must hear of it
                problem = error
            yield problem
            failed = False
        finally:
            if failed and ties is not None:
                ties.restore()
            for adapter in adapters:
                with suppress(RuntimeError) if failed else nullcontext():  # what the step raised says more
                    adapter.end(failed=failed)
        if ties is not None:
            ties.finish()

    # -- before

    def tell(
        self, program: Program, mode: int, batch: Batch, given: BaseException | None
    ) -> tuple[Preamble, BaseException | None]:
        """Tell or hear what is about to run. `given`: what is wrong on this rank already."""
        error = given
        checksums: Checksums = {}
        if self.comparison is not None and self.transport.num_ranks > 1:
            checksums = self.comparison.checksums(batch.given, step=self.transport.epoch, train=batch.train)
        if error is not None:
            self.report(None, error)
        size = program.plan.num_microbatches
        if self.preambles.parent is None:
            signature = (FAILED, 1) if error is not None else self.signature(program, batch)
            preamble = Preamble(self.transport.epoch, mode, *signature, size, *astuple(batch.rows))
            return preamble, self.preambles.tell(preamble, joined({}, checksums, self.transport.rank), error)
        heard, known, problem = self.preambles.hear()
        preamble = heard or Preamble(self.transport.epoch, mode, FAILED, 1, size)
        further = joined(known, checksums, self.transport.rank)
        error = self.preambles.tell(preamble, further, error or problem)
        mine = replace(preamble, epoch=self.transport.epoch, mode=mode, num_microbatches=size)
        rows = batch.rows.differs_from(Rows(preamble.rows, preamble.target_rows))
        unlike = difference(known, checksums, self.transport.rank)
        if (mine != preamble or rows or unlike) and error is None and not preamble.failed:
            what = rows or f"this rank is about to run {mine}, rank {self.preambles.parent} {preamble}"
            if mine == preamble and not rows:
                what = unlike
            else:
                what += ". Call the same, with the same batch, on every rank"
            error = RanksDisagree(f"rank {self.transport.rank}: {what}")
            self.report(None, error)
        return preamble, error

    def signature(self, program: Program, batch: Batch) -> tuple[int, int]:
        """The number of this shape of input under these casts, and whether it is new."""
        kind = self.transport.device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        key = (batch.shape_key, program.frozen(), cast)
        known = program.signatures
        number = known.pop(key, None)
        if number is None:
            number = len(known)
            if number == _REMEMBERED:  # the oldest makes room, on every rank: a cold step overwrites its layouts
                number = known.pop(next(iter(known)))
                program.saved.pop(number, None)
        known[key] = number
        return number, int(self.dynamic or number not in program.saved)

    # -- during

    def run(self, program: Program, batch: Batch, number: int, *, uneven: bool) -> BaseException | None:
        """Work through the calls. What goes wrong comes back, when all messages of the step are out of the way."""
        position = self.position
        position.program = program
        failure = BaseException()
        grad = program.setting.grad and torch.is_grad_enabled()
        transport, calls = self.transport, program.calls
        observers = [*self.hooks, *self.observers]
        if profiler_runs():
            observers.insert(0, ProfilerRanges())
        try:
            with torch.set_grad_enabled(grad), intercepted() if program.splits else nullcontext():
                program.begin(batch, number, uneven=uneven)
                if observers and (acting := [one for one in observers if one.before_step(program, batch)]):
                    calls = program.observed(acting)
                for position.at, call in enumerate(calls):
                    call()
                    if transport.failed is not None:
                        raise _Heard
                position.at = len(calls)
                program.finish()
                for observer in observers:
                    observer.after_step(program)
        except (_Heard, Poisoned):
            drain(program, position.at + 1)
            return _Heard()
        except BaseException as error:  # noqa: BLE001  even Ctrl-C must not leave the other ranks waiting
            if is_out_of_memory(error):
                failure = explained(error, program.actions, position.at, rank=self.transport.rank)
                for run in program.runs.values():
                    run.clear()  # what its microbatches hold is not needed any more
            elif isinstance(error, torch.AcceleratorError):  # it comes from whatever the device was told before
                before = str(position.action or "")
                failure = DeviceFailed(transport.rank, transport.epoch, str(error), before=before)
                failure.__cause__ = error
            else:
                replicas = program.setting.adapters.values() if isinstance(error, RuntimeError) else ()
                failure = next(filter(None, (replica.explain(error) for replica in replicas)), error)
        else:
            return None
        finally:
            if observers:
                program.unobserved()
        # Only here, where nothing refers to the frames of what was raised: they hold memory.
        action = position.action
        self.report(action, failure)
        # A message that raised did so before anything was posted: its checks come first.
        posted_nothing = isinstance(action, Action) and action.op.is_message
        drain(program, position.at if posted_nothing else position.at + 1)
        return failure

    def report(self, action: AnyAction | None, error: BaseException) -> None:
        """Tell the other ranks; those that cannot be told see that the connections are gone."""
        if isinstance(error, PeerFailed):  # found out here, but it happened there
            record = FailureRecord.of(error)
        else:
            record = FailureRecord(self.transport.rank, cause=f"{type(error).__name__}: {error}")
            if action is not None:
                first = parts_of(action)[0]
                record = replace(record, stage=first.stage, action=str(action), microbatch=first.microbatch)
            if isinstance(error, OutOfMemory):
                record = replace(record, cause=error.cause, out_of_memory=True)
        self._record = record
        with suppress(TransportError):
            self._record = self.transport.report_failure(record)

    # -- after

    def conclude(
        self, program: Program, error: BaseException | None, preamble: Preamble, *, certain: bool = False
    ) -> Outcome:
        """Succeed on all ranks, or raise on all; nothing of the step is left either way.

        `certain`: the error has its cause on this rank, whatever others say.
        """
        left = [] if error is not None else program.left_over()
        if left:
            error = RunError(f"left over at the end of the step: {', '.join(left[:8])}; the plan did not use them up")
            self.report(None, error)
        outcome = next((Outcome(*run.results()) for run in program.runs.values() if run.stage.is_last), Outcome())
        lost = frozenset(peer for peer, channel in program.channels.items() if channel.lost)
        program.clear()
        record = self._record or self.transport.failed
        if record is None and error is not None and not isinstance(error, _Heard):
            record = FailureRecord.of(error, self.transport.rank)
        found = verdict(self.transport, ok=error is None, record=record, lost=lost)
        self._fine = found.fine
        if found.fine:
            if preamble.cold and not self.dynamic:
                program.save_layouts(preamble.signature)
            if found.interrupt is not None:
                raise found.interrupt
            return outcome
        program.saved.pop(preamble.signature, None)  # it may have failed because the shapes are others by now
        error = found.interrupt or (None if isinstance(error, _Heard) else error)
        if error is not None and (certain or not isinstance(error, Exception)):
            raise error
        if found.record is not None and found.record.rank != self.transport.rank:
            raise found.record.error() from error  # what went wrong here may have come of the dummies that others sent
        raise error or found.unreachable or RunError("another rank has given the step up, and nobody knows why")


def _uneven(rows: Rows, preamble: Preamble) -> bool:
    """Return True if input and target have different numbers of rows, here or as the first stage's rank says."""
    return rows.uneven or Rows(preamble.rows, rows.target).uneven
