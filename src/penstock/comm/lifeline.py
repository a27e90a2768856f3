"""Lifelines: connections between hosts that carry nothing. The kernel ends one when the process at its other end ends.

Before their first step ranks capture, measure and load, each for itself: no message and no datagram of the heartbeat passes
between them yet. A rank that waits for one on another host must hear all the same that it is gone. A process that computes need
do nothing for that: its kernel takes connections, answers for it, and ends them when it dies.

    lines = Lifelines(rank, store, "10.0.0.5", patience=10.0)     # on every rank
    lines.reach(1)                                                # whoever comes later reaches who was there before
    list(lines.ended())                                           # often: who is gone, and how that was seen

Only a line that once was there can end: a network that lets none through proves nothing. One that ends is first made anew, and
only if that cannot be done its rank is gone.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from penstock.comm.beat import MAC, family_of, sign
from penstock.comm.store import keep_alive
from penstock.comm.transport import Store
from penstock.health.decoding import loads, reading
from penstock.health.failure import NOBODY

_HELLO = struct.Struct("<I")  # the rank that calls; its signature follows, by the key of the one who is called
_NOWHERE = b"[]"  # what a rank says that nobody can call
_CALLERS = 64  # that have not said yet who they are; more are sent away
_SECONDS = 2.0  # for a caller to say who it is, and for a line that has ended to be made anew


@dataclass
class _Line:
    """A connection to a peer, or the attempt to make one."""

    end: socket.socket
    hello: bytes = b""  # still to be said
    doubted: tuple[float, str] | None = None  # since when, and how the one before it has ended


class Lifelines:
    """The lines of one rank. `address` is that of this host; if no other host can reach it there are no lines."""

    def __init__(self, rank: int, store: Store, address: str | None, *, patience: float) -> None:
        self._rank, self._store, self._patience = rank, store, patience
        self._lines: dict[int, _Line] = {}
        self._callers: list[tuple[socket.socket, float]] = []
        self._gone: dict[int, str] = {}  # by peer: how that was seen
        self._called: set[int] = set()  # peers that have said where they are, or that nobody can call them
        self._key = secrets.token_bytes(32)
        local = address is None or address == "::1" or address.startswith("127.")
        self._door = listening(address, socket.SOCK_STREAM) if patience and not local else None
        where = _NOWHERE
        if self._door is not None:
            _ALL.add(self)
            where = json.dumps([*self._door.getsockname()[:2], self._key.hex()]).encode()
        store.set(f"lifeline/{rank}", where)

    def reach(self, peer: int) -> None:
        """Call a peer, once, that has said where it is. One that has not may call this rank when it comes, but may then be busy
        and not say who it is: so whoever waits for it asks again."""
        if self._door is not None and peer not in self._called and peer not in self._lines and peer not in self._gone:
            self._call(peer, doubted=None)

    def ended(self) -> Iterator[tuple[int, str]]:
        """The peers whose lines have ended for good."""
        if self._door is not None:
            self._answer(self._door)
            for peer, line in list(self._lines.items()):
                self._look(peer, line)
        yield from self._gone.items()

    def close(self) -> None:
        for end in (self._door, *(line.end for line in self._lines.values()), *(end for end, _ in self._callers)):
            if end is not None:
                end.close()
        self._door, self._lines, self._callers = None, {}, []

    def _call(self, peer: int, *, doubted: tuple[float, str] | None) -> None:
        if not self._store.check(f"lifeline/{peer}"):
            return
        self._called.add(peer)
        with reading(f"where rank {peer} can be reached"):
            said = self._store.get(f"lifeline/{peer}", 1.0)
            if said == _NOWHERE:
                return
            address, port, key = loads(said, tuple[str, int, str])
            ipaddress.ip_address(address.partition("%")[0])  # no name that would have to be looked up
            if not 0 < port < 1 << 16:
                raise ValueError(f"{port} is no port")
            hello = _HELLO.pack(self._rank)
            hello += sign(bytes.fromhex(key), hello)
        with suppress(OSError):
            end = socket.socket(family_of(address))
            self._lines[peer] = _Line(end, hello, doubted)
            self._kept_alive(end).connect_ex((address, port))

    def _look(self, peer: int, line: _Line) -> None:
        """Find out whether a line is there; one that is not is made anew once, and then given up."""
        cause = "its process has ended"
        try:
            if line.hello and select.select([], [line.end], [], 0)[1]:
                line.end.send(line.hello)  # raises if there is no connection
                line.hello, line.doubted = b"", None
            if not line.hello:
                while line.end.recv(256):  # nothing is ever sent; b"" is the end
                    continue
            elif line.doubted is None or time.monotonic() < line.doubted[0] + _SECONDS:
                return
        except BlockingIOError:
            return
        except OSError as error:
            if not isinstance(error, ConnectionError):
                cause = f"its host is out of reach: {error}"
        line.end.close()
        del self._lines[peer]
        if line.doubted is None and not line.hello:  # it was there
            self._call(peer, doubted=(time.monotonic(), cause))
        if peer not in self._lines and (line.doubted is not None or not line.hello):
            self._gone[peer] = cause if line.doubted is None else line.doubted[1]

    def _answer(self, door: socket.socket) -> None:
        """Let callers in, as far as they are peers."""
        now = time.monotonic()
        with suppress(OSError):
            while len(self._callers) <= _CALLERS:
                self._callers.append((self._kept_alive(door.accept()[0]), now))
        callers, self._callers = self._callers, []
        for number, (end, since) in enumerate(callers):
            peer = self._who(end) if number < _CALLERS else NOBODY
            if peer is None and now < since + _SECONDS:
                self._callers.append((end, since))
            elif peer is None or peer == NOBODY:
                end.close()
            else:
                if peer in self._lines:
                    self._lines[peer].end.close()
                self._lines[peer] = _Line(end)
                self._gone.pop(peer, None)

    def _who(self, end: socket.socket) -> int | None:
        """Which peer calls: NOBODY if it is none, and None as long as it has not said."""
        try:
            said = end.recv(_HELLO.size + MAC)
        except BlockingIOError:
            return None
        except OSError:
            return NOBODY
        hello, signature = said[: _HELLO.size], said[_HELLO.size :]
        known = len(said) == _HELLO.size + MAC and secrets.compare_digest(signature, sign(self._key, hello))
        return int(_HELLO.unpack(hello)[0]) if known else NOBODY

    def _kept_alive(self, end: socket.socket) -> socket.socket:
        """The kernel asks several times in a heartbeat, and no call waits."""
        end.setblocking(False)
        keep_alive(end, TCP_KEEPIDLE=self._patience / 4, TCP_KEEPINTVL=self._patience / 4, TCP_KEEPCNT=3)
        return end


def listening(address: str | None, kind: socket.SocketKind) -> socket.socket | None:
    """A socket that others can reach at this address; None if there is none."""
    if address is None:
        return None
    made = socket.socket(family_of(address), kind)
    try:
        made.bind((address, 0))
        if kind == socket.SOCK_STREAM:
            made.listen(_CALLERS)
    except OSError:
        made.close()
        return None
    made.setblocking(False)
    return made


_ALL: weakref.WeakSet[Lifelines] = weakref.WeakSet()


def _let_go() -> None:
    """In a child that was forked: its copies would keep the lines of a parent that has died."""
    for lines in list(_ALL):
        lines.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
