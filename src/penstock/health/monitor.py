"""HealthMonitor: the one thread of a process that hears of failures in all groups of the process, and tells of them.

A failure floods the links: each process forwards it once to its neighbours. The reason of a failure is sent before the
connection ends, on the same stream. A rank that waits for one that is gone has its waits ended by force.

    monitor = HealthMonitor("10.0.0.5", heartbeat=10.0)
    monitor.join(transport, "group 7", store)     # every rank of the group, in any order
    monitor.begin(transport)                      # a step; transport.failed tells of failures from here on
    monitor.end(transport)
    monitor.leave(transport, steps=12, cause="it left after step 12")
"""

from __future__ import annotations

import json
import logging
import os
import queue
import secrets
import selectors
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial

from penstock.errors import PenstockError
from penstock.health.decoding import read
from penstock.health.detector import Monitored
from penstock.health.failure import LONGEST_CAUSE, FailureKind, FailureRecord
from penstock.health.links import Endpoint, FrameKind, HealthLink, Listener
from penstock.health.membership import FOREVER, Failure, Heard, Membership
from penstock.health.peers import Peer, Peers
from penstock.health.position import Whereabouts
from penstock.health.processes import STOPPED, state_of
from penstock.health.rendezvous import RendezvousStore, group_in_job, neighbours, post, posted
from penstock.health.wake_pipe import WakePipe

_log = logging.getLogger("penstock")
_KEPT = 1024  # failures
_TICK = 0.5  # seconds between looks at what is due while something is going on
_REST = 1.0  # and while nothing is
_STATE_AFTER = 1.0  # seconds in a collective after which its neighbours are told


class HealthMonitor:
    """Of one process. It is a `penstock.health.detector.FailureDetector`."""

    def __init__(self, address: str, *, heartbeat: float) -> None:
        self.heartbeat = heartbeat
        listener = Listener(address, heartbeat=heartbeat)
        self.endpoint = listener.endpoint
        self._pipe = WakePipe()
        self._lock = threading.RLock()
        self._heard = threading.Condition(self._lock)
        self._dropped: queue.SimpleQueue[str] = queue.SimpleQueue()  # groups whose member was garbage collected
        self._members: dict[str, Membership] = {}
        self._peers = Peers(self, listener, self._lock)
        self._failures: dict[tuple[str, int, int, int, str], Heard] = {}
        self._left: dict[str, bytes] = {}  # by group that this process has left: its BYE, for ranks that join later
        self._questions: dict[str, HealthLink | None] = {}  # where each came from; None: this process
        self._answers: dict[str, list[Whereabouts]] = {}
        self._looked = time.monotonic()
        self.owner, self._stopping = os.getpid(), False
        self._peers.selector.register(self._pipe.out, selectors.EVENT_READ, self._pipe)
        self._thread = threading.Thread(target=self._run, name="penstock monitor", daemon=True)
        self._thread.start()
        _ALL.add(self)

    # -- what members call, in any thread

    def join(self, member: Monitored, group: str, store: RendezvousStore) -> None:
        """Post this process's endpoint in the store of the group, and connect to neighbours that have posted theirs."""
        group = group_in_job(store, group)
        with self._lock:
            self._members[group] = Membership(member, group)
            self._left.pop(group, None)
        weakref.finalize(member, self._dropped.put, group).atexit = False
        post(store, member.rank, self.endpoint)
        for rank in neighbours(member.rank, member.num_ranks):
            found = posted(store, rank)
            if found is not None and found.token != self.endpoint.token:
                self._peers.reach(found, group, rank)

    def begin(self, member: Monitored, name: str = "") -> None:
        with self._lock:
            mine = self._membership(member)
            if mine is None:
                return
            mine.begin(name, member.epoch)
            if self._failures:
                self.wake()  # the thread tells it of what is known already
            for peer in self._peers:
                self._compare(peer, mine)
        mine.took_signals |= self._pipe.take_signals()

    def end(self, member: Monitored) -> None:
        with self._lock:
            mine = self._membership(member)
            if mine is None:
                return
            if mine.state_sent:
                self._send_state(mine, member, "")
            mine.activity, mine.epoch = None, member.epoch
        if mine.took_signals:
            mine.took_signals = False
            self._pipe.return_signals()

    def report(self, member: Monitored, record: FailureRecord) -> FailureRecord:
        with self._lock:
            mine = self._membership(member)
            before = self.known(member)
            if mine is None or before is not None:
                return before or record
            self._adopt(Failure(mine.group, member.epoch, FOREVER if record.fatal else member.epoch, record))
        return record

    def known(self, member: Monitored) -> FailureRecord | None:
        with self._lock:
            mine = self._membership(member)
            found = [] if mine is None else list(self._counting(mine, member))
        return found[0] if found else None

    def cause(self, member: Monitored, timeout: float) -> FailureRecord | None:
        with self._lock:
            mine = self._membership(member)
            if mine is None:
                return None

            def other() -> Failure | None:
                for heard in self._failures.values():
                    if heard.failure.record.rank != mine.rank and mine.counts(heard.failure, member.awaited):
                        return heard.failure
                return None

            self._heard.wait_for(other, timeout)
            found = other()
            if found is None:
                return None
            # Out of a step there is no verdict: the others see this rank's connections end, and ask why.
            first = min(found.first, mine.epoch) if mine.activity else found.first
            self._adopt(Failure(found.group, first, found.last, found.record))
            return found.record

    def lost(self, member: Monitored) -> list[FailureRecord]:
        with self._lock:
            mine = self._membership(member)
            if mine is None:
                return []
            return [heard.failure.record for heard in self._failures.values() if mine.is_lost(heard.failure)]

    def forget(self, member: Monitored) -> None:
        """The ranks of a group have connected again: what was heard before does not count any more."""
        with self._lock:
            mine = self._membership(member)
            if mine is not None:
                mine.forget(self._failures)

    def positions(self, member: Monitored, timeout: float = 3.0) -> list[Whereabouts]:
        with self._lock:
            mine, question = self._membership(member), secrets.token_hex(8)
            if mine is None:
                return []
            self._questions[question], self._answers[question] = None, []
            self._peers.flood(FrameKind.ASK, _encoded(question, mine.group))
            self._heard.wait_for(lambda: len(self._answers[question]) >= mine.num_ranks - 1, timeout)
            return self._answers.pop(question)

    def leave(self, member: Monitored, *, steps: int, cause: str) -> None:
        with self._lock:
            mine = self._membership(member)
            if mine is not None and os.getpid() == self.owner:
                self._leave(mine, steps, cause)

    def close(self) -> None:
        """End the thread and all links without a word."""
        self._stopping = True
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)
        self.abandon()

    def abandon(self) -> None:
        """Close this process's copies of all descriptors, in a child that was forked too."""
        self._stopping = True
        self._peers.abandon()
        self._pipe.close()

    # -- what the links ask

    def wake(self) -> None:
        self._pipe.wake()

    def joined(self, group: str) -> bytes:
        return _encoded(group, self._members[group].rank, self.endpoint.encode().decode())

    def send_known(self, link: HealthLink, group: str) -> None:
        for heard in self._failures.values():
            if heard.flooded and heard.failure.group == group:
                link.send(FrameKind.FAILURE, heard.failure.encode())

    def shared(self, peer: Peer) -> list[str]:
        return [group for group in peer.ranks if group in self._members]

    def lost_peer(self, peer: Peer, kind: FailureKind, cause: str) -> None:
        with self._lock:
            for group in self.shared(peer):
                self._adopt(Failure(group, 0, FOREVER, FailureRecord(peer.ranks[group], cause=cause, kind=kind)))

    # -- failures

    def _membership(self, member: Monitored) -> Membership | None:
        for mine in self._members.values():
            if mine.member is member:
                return mine
        return None

    def _is_busy(self) -> bool:
        """True if any member is in a step or a collective."""
        return any(mine.activity is not None for mine in list(self._members.values()))

    def _counting(self, mine: Membership, member: Monitored) -> Iterator[FailureRecord]:
        for heard in self._failures.values():
            if mine.counts(heard.failure, member.awaited):
                yield heard.failure.record

    def _adopt(self, failure: Failure, origin: HealthLink | None = None, *, flood: bool = True) -> None:
        """Keep a failure, and send it to all neighbours but the one that it came from."""
        with self._lock:
            heard = self._failures.get(failure.key)
            if heard is None:
                heard = self._failures[failure.key] = Heard(failure, time.monotonic())
                if len(self._failures) > _KEPT:
                    del self._failures[next(iter(self._failures))]
            if flood and not heard.flooded:
                heard.flooded = True
                self._peers.flood(FrameKind.FAILURE, failure.encode(), origin)
            self._heard.notify_all()
        self.wake()

    def _tell(self, mine: Membership) -> list[partial[None]]:
        """Tell a member of the failures that count, and return what its waits are to be ended with."""
        due, member = [], mine.member
        for heard in list(self._failures.values()):
            record = mine.due(heard, time.monotonic())
            counts = member is not None and mine.activity is not None and mine.counts(heard.failure, member.awaited)
            if counts and not heard.flooded:
                self._adopt(heard.failure)  # a farewell is told on only when somebody waits for the rank that left
            if record is not None and member is not None:
                due.append(partial(member.break_connections, record))
        return due

    def _leave(self, mine: Membership, steps: int, cause: str) -> None:
        del self._members[mine.group]
        bye = self._left[mine.group] = _encoded(mine.group, mine.rank, steps, cause[:LONGEST_CAUSE])
        if len(self._left) > _KEPT:
            del self._left[next(iter(self._left))]
        for peer in self._peers:
            if peer.ranks.pop(mine.group, None) is not None:
                peer.send(FrameKind.BYE, bye)
        self._peers.part()

    def _drop(self, group: str) -> None:
        """A member was garbage collected: nobody can call its next step."""
        mine = self._members.get(group)
        if mine is not None and mine.member is None:
            self._leave(mine, mine.epoch, f"it left after step {mine.epoch}")

    # -- the thread

    def _run(self) -> None:
        while not self._stopping:
            tick = min(_TICK if self._is_busy() else _REST, self.heartbeat / 5 or _REST)
            with self._lock:
                tick = tick if self._peers.flush() else 0.02
            for key, _ in self._peers.selector.select(tick):
                if self._stopping:
                    return
                if key.data is self._pipe:
                    self._interrupt(self._pipe.interrupts())
                elif key.data is None:
                    self._peers.accept()
                else:
                    self._read(key.data)
            self._tick()

    def _tick(self) -> None:
        with self._lock:
            now = time.monotonic()
            self._peers.end_strangers()
            while not self._dropped.empty():
                self._drop(self._dropped.get())
            self._look_at_processes(now)
            due: list[partial[None]] = []
            for mine in list(self._members.values()):
                member = mine.member
                if member is not None and mine.activity is None and member.is_gone():
                    self._leave(mine, mine.epoch, f"it left after step {mine.epoch}: its process group was destroyed")
                    continue
                if member is not None and mine.activity and not mine.state_sent and now > mine.since + _STATE_AFTER:
                    mine.state_sent = True
                    self._send_state(mine, member, mine.activity)
                due += self._tell(mine)
        for abort in due:
            try:
                abort()
            except Exception:  # noqa: BLE001  the thread has to go on, for all other groups of the process
                _log.exception("penstock could not end the waits of a process group after a failure")

    def _look_at_processes(self, now: float) -> None:
        """Find processes of this host that are stopped. Time in which this process did not look does not count: it may have been
        stopped itself."""
        unseen, self._looked = now - self._looked - max(_REST, self.heartbeat / 4) - _TICK, now
        if not self.heartbeat or not self._is_busy():
            return
        for peer in self._peers:
            there = peer.endpoint
            if there is None or there.host != self.endpoint.host or not there.host:
                continue
            state, started = state_of(there.process)
            if state != STOPPED or started != there.started:
                peer.stopped = None
                continue
            peer.stopped = now if peer.stopped is None else peer.stopped + max(0.0, unseen)
            if now - peer.stopped > self.heartbeat:
                cause = f"its process has been stopped for {now - peer.stopped:.0f} s (by SIGSTOP or Ctrl-Z)"
                self.lost_peer(peer, FailureKind.STOPPED, cause)

    def _interrupt(self, times: int) -> None:
        """Ctrl-C becomes a failure of this rank, so that the others drain; a second one ends its waits by force."""
        for mine in list(self._members.values()):
            if mine.activity is None or not times:
                continue
            member = mine.member
            mine.interrupts += times
            cause = "KeyboardInterrupt: interrupted by SIGINT"
            record = FailureRecord(mine.rank, cause=cause, kind=FailureKind.INTERRUPTED)
            if mine.activity == "" or mine.interrupts > 1:  # a collective goes on to its end, if it can
                self._adopt(Failure(mine.group, mine.epoch, mine.epoch, record))
            if mine.interrupts > 1 and member is not None:
                member.break_connections(record)

    def _read(self, link: HealthLink) -> None:
        try:
            for kind, payload in link.frames():
                with self._lock:
                    self._on(link, kind, payload)
        except (EOFError, OSError, ValueError, PenstockError) as error:  # or what came makes no sense
            self._peers.ended(link, error)

    def _on(self, link: HealthLink, kind: FrameKind, payload: bytes) -> None:
        if kind is FrameKind.HELLO:
            self._peers.welcome(link, payload)
            return
        peer = self._peers.get(link.token)
        match kind:
            case FrameKind.JOIN:
                group, rank, where = read(payload, tuple[str, int, str], "a JOIN")
                peer.endpoint = Endpoint.decode(where.encode(), f"rank {rank}")
                if group in self._left:
                    link.send(FrameKind.BYE, self._left[group])
                else:  # its own member of the group may still come
                    peer.ranks[group] = rank
                self.send_known(link, group)
            case FrameKind.FAILURE:
                self._adopt(Failure.decode(payload), link)
            case FrameKind.BYE:
                group, rank, steps, cause = read(payload, tuple[str, int, int, str], "a BYE")
                peer.ranks.pop(group, None)
                left = FailureRecord(rank, cause=cause, kind=FailureKind.LEFT)
                self._adopt(Failure(group, steps + 1, FOREVER, left), link, flood=False)
            case FrameKind.ASK:
                self._on_question(link, payload)
            case FrameKind.ANSWER:
                question, position = read(payload, tuple[str, str], "an ANSWER")
                if question in self._answers:
                    self._answers[question].append(Whereabouts.decode(position.encode()))
                    self._heard.notify_all()
                elif (back := self._questions.get(question)) is not None:
                    back.send(FrameKind.ANSWER, payload)
            case FrameKind.STATE:
                group, _, steps, number, name = read(payload, tuple[str, int, int, int, str], "a STATE")
                peer.states[group] = steps, number, name
                if group in self._members:
                    self._compare(peer, self._members[group])

    def _on_question(self, link: HealthLink, payload: bytes) -> None:
        question, group = read(payload, tuple[str, str], "an ASK")
        if question in self._questions:
            return
        self._questions[question] = link
        if len(self._questions) > _KEPT:
            del self._questions[next(iter(self._questions))]
        self._peers.flood(FrameKind.ASK, payload, link)
        mine = self._members.get(group)
        member = None if mine is None else mine.member
        if member is not None:
            link.send(FrameKind.ANSWER, _encoded(question, member.where().encode().decode()))

    # -- ranks that part ways

    def _send_state(self, mine: Membership, member: Monitored, name: str) -> None:
        state = _encoded(mine.group, mine.rank, member.epoch, member.meetings, name)
        for peer in self._peers:
            if mine.group in peer.ranks:
                peer.send(FrameKind.STATE, state)

    def _compare(self, peer: Peer, mine: Membership) -> None:
        """A rank that waits in a later collective with fewer steps behind it will never come to this step."""
        steps, number, name = peer.states.get(mine.group, (FOREVER, 0, ""))
        member, rank = mine.member, peer.ranks.get(mine.group)
        if member is None or rank is None or mine.activity != "" or not name:
            return
        if steps < mine.epoch and number > member.meetings:
            went = FailureRecord(rank, cause=f"after step {steps} it went to {name}", kind=FailureKind.LEFT)
            cause = f"it is in step {mine.epoch} instead of {name}"
            stayed = FailureRecord(mine.rank, cause=cause, kind=FailureKind.LEFT)
            self._adopt(Failure(mine.group, mine.epoch, FOREVER, went))
            self._adopt(Failure(mine.group, 0, mine.epoch - 1, stayed))


def _encoded(*parts: object) -> bytes:
    return json.dumps(parts).encode()


_ALL: weakref.WeakSet[HealthMonitor] = weakref.WeakSet()


def _after_fork() -> None:
    """In a child: its copies of the links would keep them open when its parent dies."""
    for monitor in list(_ALL):
        monitor.abandon()
    _ALL.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
