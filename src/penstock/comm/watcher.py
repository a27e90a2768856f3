"""A thread that listens during steps and collectives: for failures that other ranks post, for ranks that leave, and for Ctrl-C.

The main thread may sit in a wait that no signal and no exception can end. So peers that hear of a failure drain: they
send what is awaited, unfilled, and the wait ends. Where nobody is left to drain, the watcher breaks the connections.
"""

from __future__ import annotations

import json
import os
import select
import signal
import threading
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.comm.bell import BellThread
from penstock.comm.store import DistributedStore
from penstock.comm.transport import meeting_folder
from penstock.errors import RanksDisagree, StepTimeout, TransportError
from penstock.health.decoding import read
from penstock.health.failure import NOBODY, FailureRecord

if TYPE_CHECKING:
    from penstock.comm.distributed import DistributedTransport

_TICK = 0.3  # seconds that a look at the store may take, and until the first
_GRACE = 1.5  # seconds for a step to end by itself after a rank has left, before its connections are broken


class Watcher(BellThread):
    """Listens from ``begin`` to ``end`` of each step, and rests between. Holds its transport weakly."""

    def __init__(self, transport: DistributedTransport, store: DistributedStore) -> None:
        super().__init__("penstock watcher")
        self._transport = weakref.ref(transport)
        self._store = store
        self._epoch = 0  # the step that is watched, 0 between steps
        self._left_since: float | None = None
        self._interrupts = 0
        self._began, self._called = (
            0.0,
            False,
        )  # of a collective: when, and whether it is told that this rank waits there
        self._answered = 0  # the number of the last question where this rank is
        self._signals_before: int | None = None
        self._thread.start()

    def begin(self, epoch: int) -> None:
        self._epoch, self._left_since, self._interrupts = epoch, None, 0
        self._began, self._called = time.monotonic(), False
        if threading.current_thread() is threading.main_thread():
            self._signals_before = signal.set_wakeup_fd(self._button, warn_on_full_buffer=False)

    def end(self) -> None:
        self._epoch = 0
        if self._signals_before is not None:
            signal.set_wakeup_fd(self._signals_before)
            self._signals_before = None

    def _listen(self) -> None:
        tick = _TICK
        while not self._stopping:
            ready, _, _ = select.select([self._bell], [], [], tick)
            transport = self._transport()
            if transport is None or self._stopping:
                return
            tick = transport.pulse.tick
            silent = transport.pulse.look()
            if silent is not None and self._epoch:
                self._blame(transport, self._epoch, silent)
            try:
                if ready:
                    self._hear_signals(transport, os.read(self._bell, 64))
                if self._epoch:
                    self._look(transport, self._epoch)
                transport.where()  # so that it is known since when a rank is where it is
                self._answered = self._store.answer(transport.where, self._answered)
            except StepTimeout:
                pass  # what stood there a moment ago is gone, since its step is over, or the store is slow: look again
            except TransportError as error:
                # The store's process is gone or out of reach, and with it every record; or what stands there makes no sense.
                if self._epoch:
                    holder = transport.store_holder if self._store.gone else NOBODY
                    self._blame(transport, self._epoch, FailureRecord(holder, cause=str(error)))
            del transport

    def _look(self, transport: DistributedTransport, epoch: int) -> None:
        key = transport.failure_key
        if (transport.failed is None or transport.in_collective is not None) and self._store.check(key):
            record = FailureRecord.decode(self._store.get(key, _TICK))
            if record.rank != transport.rank:
                tell = self._tell if transport.in_collective is None else self._blame  # nobody drains a collective
                tell(transport, epoch, record)
        for steps, record in self._store.departures():
            if steps < epoch and record.rank != transport.rank:
                self._blame(transport, epoch, record)
        if transport.in_collective is None:
            self._look_for_meetings(transport, epoch)
        elif time.monotonic() > self._began + _TICK:
            self._look_around(transport, epoch)

    def _look_around(self, transport: DistributedTransport, epoch: int) -> None:
        """In a collective that does not end at once: is a neighbour gone, or somebody in a step instead?"""
        parent, children = transport.family()
        transport.pulse.notice([*children, *([] if parent is None else [parent])])
        for record in transport.pulse.all_ended():
            self._blame(transport, epoch, record)
        folder, name = meeting_folder(transport.meetings), transport.in_collective
        if not self._called:
            self._called = True
            self._store.first(f"{folder}/called", json.dumps([transport.rank, transport.epoch, name]).encode())
        if self._store.check(f"{folder}/declined"):
            self._blame(transport, epoch, FailureRecord.decode(self._store.get(f"{folder}/declined", _TICK)))
        if transport.epoch == 0 and self._store.check("device types"):
            try:
                transport._raise_if_unlike(_TICK)
            except RanksDisagree as error:
                transport.break_connections(FailureRecord(NOBODY, cause=str(error)))

    def _look_for_meetings(self, transport: DistributedTransport, epoch: int) -> None:
        """A rank that waits at the next meeting with fewer steps behind it will never come to this step."""
        folder = meeting_folder(transport.meetings + 1)
        if not self._store.check(f"{folder}/called"):
            return
        called = self._store.get(f"{folder}/called", _TICK)
        rank, steps, name = read(called, tuple[int, int, str], "who called a meeting")
        if steps < epoch and rank != transport.rank:
            declined = FailureRecord(transport.rank, cause=f"it is in step {epoch} instead of {name!r}")
            self._store.first(f"{folder}/declined", declined.encode())
            self._blame(transport, epoch, FailureRecord(rank, cause=f"after step {steps} it went to {name!r}"))

    def _tell(self, transport: DistributedTransport, epoch: int, record: FailureRecord) -> None:
        if self._epoch == epoch and epoch and transport.failed is None:
            transport.failed = record

    def _blame(self, transport: DistributedTransport, epoch: int, record: FailureRecord) -> None:
        """For one that will not come: if the step does not end by itself soon, its connections are broken."""
        self._tell(transport, epoch, record)
        now = time.monotonic()
        if self._left_since is None:
            self._left_since = now
        elif now > self._left_since + _GRACE and self._epoch == epoch and transport.failed is not None:
            self._left_since = float("inf")
            with suppress(TransportError):  # first the reason: others see that the connections end, and ask why
                self._store.first(transport.failure_key, transport.failed.encode())
            transport.break_connections(transport.failed)

    def _hear_signals(self, transport: DistributedTransport, numbers: bytes) -> None:
        """Ctrl-C becomes a failure of this rank, so that the others drain; a second one ends the wait by force."""
        before = self._signals_before
        if before is not None and before >= 0:
            with suppress(OSError):
                os.write(before, numbers)
        interrupts = numbers.count(signal.SIGINT)
        if not self._epoch or not interrupts or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        self._interrupts += interrupts
        record = FailureRecord(transport.rank, cause="KeyboardInterrupt: interrupted by SIGINT")
        if transport.in_collective is None or self._interrupts > 1:  # a collective goes on to its end, if it can
            self._store.first(transport.failure_key, record.encode())
        if self._interrupts > 1:
            transport.break_connections(record)
