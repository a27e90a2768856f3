"""Switchboard: gives lines between ranks of one host their sockets, and lets nobody else in.

A rank listens only while it connects, in a directory of its own that no other user can enter. Whoever knocks is asked for
its credentials by the kernel, and must know the secret that the rank put in the store; whoever asks for a line looks at the
credentials of the one who listens, since the store, which said where to knock, believes everybody. A silent knock costs
nothing: all are heard at once, until one deadline.

    switchboard = Switchboard(rank, store)          # on every rank
    line = switchboard.line(1, send, receive)       # the way to rank 1, by the backend
    switchboard.connect([1, 2])                     # on every rank, after the same meeting or step
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import shutil
import socket
import struct
import tempfile
import time
import weakref
from collections.abc import Collection, Mapping
from contextlib import suppress

from penstock.comm.line import Line
from penstock.comm.messages import Receive, Send
from penstock.comm.transport import Store
from penstock.errors import PenstockError
from penstock.health.decoding import loads, reading
from penstock.health.processes import host_identity

_HELLO = struct.Struct("<32sII")  # secret, rank, how often the rank that listens has connected
_CREDENTIALS = struct.Struct("iII")  # process, user, group
_PATIENCE = 30.0  # seconds that a rank may take from the end of a meeting, or of a step, to connecting


class Switchboard:
    """The lines of one rank. Every rank of the transport makes one, or has none of its messages go over sockets."""

    def __init__(self, rank: int, store: Store) -> None:
        self.rank = rank
        self._store = store
        self._lines: dict[int, Line] = {}
        self._hosts: dict[int, str] = {}  # of the peers with whom messages are exchanged
        self._rounds: dict[int, int] = {}  # by peer: how often this pair has connected
        self._up = False
        weakref.finalize(self, _close_all, self._lines).atexit = False
        self._store.set(f"host/{rank}", _HOST.encode())

    def line(self, peer: int, send: Send, receive: Receive) -> Line:
        if peer not in self._lines:
            self._lines[peer] = Line(send, receive)
        return self._lines[peer]

    def connect(self, peers: Collection[int] = ()) -> None:
        """Attach sockets to the lines of these peers, and of those named before, where they are on this host.

        All ranks do so after the same meeting or step. Whoever has the lower rank asks. Nothing is raised, since all went
        well so far: a line whose other end cannot be reached is attached and closed, so that its next message says so.
        """
        self._up = True
        try:
            for peer in sorted({*peers} - {*self._hosts}):
                self._hosts[peer] = self._store.get(f"host/{peer}", _PATIENCE).decode()
        except PenstockError:
            return  # the store is gone, and the next step will say so
        near = [peer for peer in sorted(self._hosts) if _HOST and self._hosts[peer] == _HOST]
        missing = [peer for peer in near if self._lines[peer].limit < 0]
        for peer in missing:
            self._rounds[peer] = self._rounds.get(peer, 0) + 1
        found: dict[int, socket.socket | None] = {}  # None: one of the two has nowhere to listen, so the backend stays
        end = time.monotonic() + _PATIENCE
        try:
            with _Door({peer: self._rounds[peer] for peer in missing if peer < self.rank}) as door:
                with suppress(PenstockError):
                    for peer in door.callers:  # let them know where to knock
                        key = f"line/{peer}/{self.rank}/{self._rounds[peer]}"
                        self._store.set(key, json.dumps([door.place, door.secret.hex()]).encode())
                for peer in missing:
                    if peer > self.rank:
                        with suppress(PenstockError, OSError):
                            found[peer] = self._ask(peer, end)
                door.answer(found, end)
        finally:
            for peer in {*missing} - {*found}:
                # Or Ctrl-C came. The other end may have its socket, so the next message must fail.
                self._lines[peer].attach(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                self._lines[peer].close()
            for peer, sock in found.items():
                if sock is not None:
                    self._lines[peer].attach(sock)

    def begin(self, step: int) -> None:
        for line in self._lines.values():
            line.step = step & 0xFFFFFFFF

    def end(self, *, fine: bool) -> None:
        """After a step: if it failed, give up all sockets, since messages of it may be on them; after the next one that
        goes well make new ones."""
        if fine and not self._up:
            self.connect()
        elif not fine:
            self._up = False
            for line in self._lines.values():
                line.detach()

    def close(self) -> None:
        """End all sockets."""
        _close_all(self._lines)

    def _ask(self, peer: int, end: float) -> socket.socket | None:
        key = f"line/{self.rank}/{peer}/{self._rounds[peer]}"
        with reading("the door of a rank"):
            place, given = loads(self._store.get(key, max(0.0, end - time.monotonic())), tuple[str, str])
            secret = bytes.fromhex(given)
        self._store.delete(key)
        if not place:
            return None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.connect(place)
            if _user_of(sock) != os.getuid():
                raise PermissionError(f"{place} is served by another user")
            sock.send(_HELLO.pack(secret, self.rank, self._rounds[peer]), socket.MSG_NOSIGNAL)
        except OSError:
            sock.close()
            raise
        return sock


class _Door:
    """A place where only this user's processes can knock, for as long as the block lasts."""

    def __init__(self, callers: Mapping[int, int]) -> None:
        self.callers = dict(callers)  # by rank: its round
        self._folder = self.place = ""  # "": nobody comes, or there is nowhere to listen
        self.secret = secrets.token_bytes(32)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def __enter__(self) -> _Door:
        if self.callers:
            with suppress(OSError):
                self._folder = tempfile.mkdtemp(prefix="penstock-", dir=_short_folder())  # for its owner alone
                self._listener.bind(f"{self._folder}/line")
                self._listener.listen(socket.SOMAXCONN)
                self._listener.setblocking(False)
                self.place = f"{self._folder}/line"
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def answer(self, found: dict[int, socket.socket | None], end: float) -> None:
        """Let the callers in, each as it comes, until all are here or the time is over. Nobody is waited for alone."""
        if not self.place:
            found.update(dict.fromkeys(self.callers))
            return
        with selectors.DefaultSelector() as doorway:
            doorway.register(self._listener, selectors.EVENT_READ)
            try:
                while self.callers and time.monotonic() < end:
                    for key, _ in doorway.select(max(0.0, end - time.monotonic())):
                        if key.fileobj is self._listener:
                            with suppress(OSError):
                                doorway.register(self._listener.accept()[0], selectors.EVENT_READ)
                        elif isinstance(key.fileobj, socket.socket):
                            self._hear(doorway, key.fileobj, found)
            finally:
                for key in list(doorway.get_map().values()):  # whoever knocked and never said its name
                    if isinstance(key.fileobj, socket.socket):
                        key.fileobj.close()

    def _hear(
        self, doorway: selectors.BaseSelector, sock: socket.socket, found: dict[int, socket.socket | None]
    ) -> None:
        doorway.unregister(sock)
        rank = self._who(sock)
        if rank is None:
            sock.close()
        else:
            del self.callers[rank]
            found[rank] = sock

    def _who(self, sock: socket.socket) -> int | None:
        sock.setblocking(False)
        try:
            user = _user_of(sock)
            secret, rank, number = _HELLO.unpack(sock.recv(_HELLO.size))
        except (OSError, struct.error):
            return None
        known = user == os.getuid() and secrets.compare_digest(secret, self.secret)
        return rank if known and self.callers.get(rank) == number else None


def _close_all(lines: Mapping[int, Line]) -> None:
    for line in lines.values():
        line.close()


def _user_of(sock: socket.socket) -> int:
    """The user whose process is at the other end, as the kernel knows it."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(found)[1])


def _short_folder() -> str:
    """Where to make the directory: the name of a socket has at most 107 bytes."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) < 80 else "/tmp"


def _host() -> str:
    """What is the same for two processes if and only if one can reach the other's sockets; "" where there are no lines."""
    needed = ("AF_UNIX", "SOCK_SEQPACKET", "SO_PEERCRED")
    if not all(hasattr(socket, name) for name in needed) or os.environ.get("PENSTOCK_LINES") == "0":
        return ""
    here = host_identity("net", "mnt")
    return here and f"{here}/{os.getuid()}"


_HOST = _host()
