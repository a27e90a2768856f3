"""Pulse: finds out that a peer is stopped, or that its host cannot be reached, while its connections stay open and silent.

The process of a peer on this host is looked up in the kernel's own table: one that is stopped says so there, however long it
computes otherwise. Peers on other hosts send a datagram a few times in each heartbeat, from a small process beside them
(`penstock.comm.beat`); one whose datagrams came and stop to come is named. A network that never let one through proves nothing.

    pulse = Pulse(rank, store, patience=10.0)      # on every rank
    pulse.watch([1, 2])
    pulse.look()                                   # often: None, or who is stopped or silent
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from torch.distributed.distributed_c10d import _get_default_store

from penstock.comm import beat
from penstock.comm.lifeline import Lifelines, listening
from penstock.comm.store import innermost
from penstock.comm.transport import Store
from penstock.errors import PenstockError
from penstock.health.decoding import loads, read, reading
from penstock.health.failure import FailureRecord

_BEATS = 5  # datagrams in a heartbeat: one or two may get lost
_SHORTEST = 0.5  # seconds; a shorter heartbeat would be more looks than work
_TICK = 0.3  # seconds between looks, at most
_LIFELINES = 32  # peers on other hosts that a rank has a line to, beside its neighbours
_PATIENCE = 30.0  # seconds for the peers to say where they are
_STOPPED = "its process has been stopped for {:.0f} s (by SIGSTOP or Ctrl-Z)"
_SILENT = "nothing was heard from its host for {:.0f} s: the network or the host is down"
_SEEN = ("pid", "net")  # namespaces of the kernel: ranks that share them see each other's process in its table


def heartbeat() -> float:
    """Seconds after which a silent rank counts as lost: PENSTOCK_HEARTBEAT in the environment, or 10. 0: never."""
    given = os.environ.get("PENSTOCK_HEARTBEAT", "10")
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if seconds != 0.0 and not _SHORTEST <= seconds < float("inf"):
        raise PenstockError(
            f"PENSTOCK_HEARTBEAT={given!r}; expected seconds such as 10, at least {_SHORTEST}, or 0 for no heartbeat"
        )
    return seconds


class Pulse:
    """The heartbeat of one rank, and what it hears of those of others. ``patience``: seconds, the heartbeat."""

    def __init__(self, rank: int, store: Store, *, patience: float, address: str | None) -> None:
        self.rank, self.patience = rank, patience
        self.tick = min(_TICK, patience / 10) if patience else _TICK  # seconds between looks
        self._store, self._address = store, address
        self._near: dict[int, tuple[int, str]] = {}  # peers on this host: process, and when it was started
        self._far: dict[int, tuple[str, int, str]] = {}  # peers elsewhere: address, port and key
        self._elsewhere: list[int] = []  # peers that were noticed, and are not on this host; the first ones are called
        self._heard: dict[int, int] = {}  # by peer elsewhere: the number of its last datagram
        self._since: dict[tuple[int, str], float] = {}  # by peer and cause of worry: since when
        self._looked = time.monotonic()
        self._lock = threading.Lock()
        self._key = secrets.token_bytes(32)
        self._socket: socket.socket | None = None  # hears of peers elsewhere, if there are any
        self._end_heart: Callable[[], object] = lambda: None
        self._lifelines: Lifelines | None = None  # to peers elsewhere that were noticed
        store.set(f"process/{rank}", this_process())

    def watch(self, peers: Iterable[int]) -> None:
        """Look after these peers from now on, as they do after this rank, as far as they have said which process they are."""
        wanted = {*peers} - {*self._near} - {*self._far} if self.patience else ()
        far = [peer for peer in wanted if self._store.check(f"process/{peer}") and not self._is_near(peer)]
        if not far:
            return
        if self._socket is None:
            self._socket = listening(self._address, socket.SOCK_DGRAM)
            if self._socket is not None:
                weakref.finalize(self, self._socket.close)
            where = ["", 0] if self._socket is None else list(self._socket.getsockname()[:2])
            self._store.set(f"pulse/{self.rank}", json.dumps([*where, self._key.hex()]).encode())
        for peer in far:
            with reading(f"the address of rank {peer}"):
                place = loads(self._store.get(f"pulse/{peer}", _PATIENCE), tuple[str, int, str])
                bytes.fromhex(place[2])
            self._far[peer] = place
        self._end_heart()
        heart = _start_heart(self.rank, self.patience / _BEATS, [place for place in self._far.values() if place[0]])
        self._end_heart = weakref.finalize(self, _end_heart, heart)

    def notice(self, peers: Iterable[int]) -> None:
        """Look after these peers, as far as they have said by now which process they are. Before the first step that is in this
        host's table of processes, and by a line to those on other hosts."""
        if self._lifelines is None:
            self._lifelines = Lifelines(self.rank, self._store, self._address, patience=self.patience)
        for peer in {*peers} - {*self._near} - {self.rank} if self.patience else ():
            if peer not in self._elsewhere and self._store.check(f"process/{peer}") and not self._is_near(peer):
                self._elsewhere.append(peer)
            if peer in self._elsewhere[:_LIFELINES]:
                self._lifelines.reach(peer)  # again and again: it may not have said yet where it can be called

    def _is_near(self, peer: int) -> bool:
        """Whether the process of a peer is in the table of this host; then it is looked after from now on."""
        found = _on_this_host(self._store.get(f"process/{peer}", _PATIENCE), peer)
        if found is not None:
            self._near = {**self._near, peer: found}  # another thread may be reading it
        return found is not None

    def look(self) -> FailureRecord | None:
        """Who has been stopped or silent for longer than a heartbeat."""
        with self._lock:
            now = time.monotonic()
            unseen = now - self._looked - self.patience / 4
            if unseen > 0.0:  # it is this process that was stopped, or busy: what it has not seen does not count
                self._since = {worry: since + unseen for worry, since in self._since.items()}
            self._looked = now
            self._ask_the_kernel(now)
            self._listen(now)
            for (peer, cause), since in self._since.items():
                if now - since > self.patience:
                    return FailureRecord(peer, cause=cause.format(now - since))
        return None

    def ended(self) -> FailureRecord | None:
        """A peer whose process is no longer there: on this host, or on another one as far as there is a line to it."""
        return next(iter(self.all_ended()), None)

    def all_ended(self) -> list[FailureRecord]:
        with self._lock:
            found = [] if self._lifelines is None else list(self._lifelines.ended())
        found += [(peer, "its process has ended") for peer, process in self._near.items() if _is_over(*process)]
        return [FailureRecord(peer, cause=cause) for peer, cause in found]

    def close(self) -> None:
        self._end_heart()
        with self._lock:
            if self._lifelines is not None:
                self._lifelines.close()

    def _ask_the_kernel(self, now: float) -> None:
        for peer, (process, started) in self._near.items():
            state, since = beat.state_of(process)
            self._note(peer, state if since == started else "", now)

    def _listen(self, now: float) -> None:
        if self._socket is None:
            return
        with suppress(BlockingIOError):
            while True:
                data = self._socket.recv(256)
                pulse, mac = data[: -beat.MAC], data[-beat.MAC :]
                with suppress(struct.error):
                    peer, number, state = beat.PULSE.unpack(pulse)
                    known = peer in self._far and secrets.compare_digest(mac, beat.sign(self._key, pulse))
                    if known and number > self._heard.get(peer, -1):
                        self._heard[peer], self._since[peer, _SILENT] = number, now
                        self._note(peer, state.decode("ascii", "replace"), now)

    def _note(self, peer: int, state: str, now: float) -> None:
        if state == "T":
            self._since.setdefault((peer, _STOPPED), now)
        else:
            self._since.pop((peer, _STOPPED), None)


def own_address() -> str | None:
    """The address of this host that ranks on other hosts can reach: the one that it reaches the job's store by."""
    inner = innermost(_get_default_store())
    host, port = getattr(inner, "host", None), getattr(inner, "port", None)
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError:  # or the store is of another kind, such as a file
        return None


def _start_heart(rank: int, seconds: float, peers: list[tuple[str, int, str]]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", str(Path(beat.__file__))]
    heart = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert heart.stdin is not None, "asked for"
    heart.stdin.write(json.dumps({"rank": rank, "seconds": seconds, "peers": peers}).encode() + b"\n")
    heart.stdin.flush()
    return heart


def _end_heart(heart: subprocess.Popen[bytes]) -> None:
    try:
        heart.communicate(timeout=5.0)  # it ends when its input ends
    except (OSError, subprocess.TimeoutExpired):
        heart.kill()


def this_process() -> bytes:
    """What ranks on the same host need to look after this process."""
    return json.dumps([beat.kernel(*_SEEN), os.getpid(), beat.state_of(os.getpid())[1]]).encode()


def has_ended(process: bytes, rank: int) -> bool:
    """Whether what `this_process` told of another rank is known to be over: of another host that is not known."""
    found = _on_this_host(process, rank)
    return found is not None and _is_over(*found)


def _on_this_host(process: bytes, rank: int) -> tuple[int, str] | None:
    """The number of a process, and when it was started, if it is in the table of this host."""
    space, number, started = read(process, tuple[str, int, str], f"the process of rank {rank}")
    return (number, started) if space and space == beat.kernel(*_SEEN) else None


def _is_over(process: int, started: str) -> bool:
    state, since = beat.state_of(process)
    return since != started or state == "Z"
