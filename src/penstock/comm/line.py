"""Lines: sockets between ranks of one host, which the ranks' main threads use themselves, for small messages.

A backend of torch.distributed hands every message to a thread of its own, on both sides; for a small message the threads'
waking up costs far more than the message. Over a line a message is one system call for the sender and one for the
receiver. Sockets keep packets apart (SOCK_SEQPACKET), so a message arrives whole or not at all, whatever interrupts.

    switchboard = Switchboard(rank, store)          # on every rank
    switchboard.introduce([1, 2])                   # with the ranks that it has had messages from
    switchboard.connect([1, 2])                     # on every rank after the same step
    line = switchboard.lines[1]
    line.send(tensor)                               # never blocks
    line.expect(buffer).wait()
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from ctypes import Array, c_char
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.comm.transport import Store

LIMIT = 1 << 17
"""Bytes of the largest message that goes over a line. A larger one gains from a backend's thread, which overlaps it."""

_HEADER = struct.Struct("<III")  # step, number of the message on the line, size: what no correct message differs in
_HELLO = struct.Struct("<32sII")  # secret, rank, how often this pair has connected
_TIMEVAL = struct.Struct("ll")
_WHOLE_NUMBER = 0xFFFFFFFF
_BUFFER = 1 << 22  # bytes that may be on their way; the system gives less if it must
_LONGEST = timedelta(minutes=30)  # that a wait may take which brings no bound of its own, as in a process group
_PATIENCE = 30.0  # seconds that a rank may take from the end of one step to connecting


class Arrival:
    """A message that is expected. Those of a line arrive in the order in which they are expected."""

    __slots__ = ("_line", "done", "size", "tensor", "view")

    def __init__(self, line: Line, tensor: Tensor, size: int) -> None:
        self._line = line
        self.tensor = tensor  # keeps the memory alive that `view` shows
        self.size = size
        self.view = _bytes_of(tensor, size)
        self.done = False

    def wait(self, timeout: timedelta | None = None, /) -> None:
        line = self._line
        if timeout is not None and timeout is not line.timeout:
            line.set_timeout(timeout)
        while not self.done:
            line.pull()


class Line:
    """One rank's end of a line to another rank."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        weakref.finalize(self, sock.close).atexit = False
        sock.settimeout(None)  # the kernel keeps the bound: a wait is one call
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self._send = sock.sendmsg
        self._receive = sock.recvmsg_into
        self.set_timeout(_LONGEST)
        self.step = 0  # goes with every message, so that none is ever taken for one of another step
        self._sent = 0
        self._received = 0
        self._expected: deque[Arrival] = deque()
        self._header = bytearray(_HEADER.size)
        self._overflow: deque[bytes] = deque()  # what the socket would not take yet, in order; a thread sends it
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._owner = os.getpid()

    # -- sending

    def send(self, tensor: Tensor) -> None:
        """Send a contiguous tensor of at most LIMIT bytes. It may be changed as soon as this returns."""
        size = tensor.nbytes
        number = self._sent = self._sent + 1 & _WHOLE_NUMBER
        packet = (_HEADER.pack(self.step, number, size), _bytes_of(tensor, size))
        if not self._overflow:
            try:
                self._send(packet, (), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                pass
            except OSError as error:
                raise self._lost(error) from error
            else:
                return
        self._defer(b"".join(packet))

    def _defer(self, packet: bytes) -> None:
        """The other end is far behind: a thread sends the packet when there is room, and this rank goes on."""
        with self._wake:
            self._overflow.append(packet)
            self._wake.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_overflow, name="penstock line", daemon=True)
            self._thread.start()

    def _send_overflow(self) -> None:
        while True:
            with self._wake:
                while not self._overflow and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
                packet = self._overflow[0]
            try:
                self._socket.send(packet, socket.MSG_NOSIGNAL)
            except OSError:
                return  # the next message, of either side, finds the line closed
            with self._wake:
                self._overflow.popleft()

    # -- receiving

    def expect(self, tensor: Tensor) -> Arrival:
        """The next message fills the tensor, which is contiguous and has its size."""
        arrival = Arrival(self, tensor, tensor.nbytes)
        self._expected.append(arrival)
        return arrival

    def pull(self) -> None:
        """Take the next message from the socket; wait for it if need be."""
        arrival = self._expected[0]
        expected = _HEADER.pack(self.step, self._received + 1 & _WHOLE_NUMBER, arrival.size)
        # It may be there already: Ctrl-C can break in between the arrival of a message and the lines below.
        if self._header != expected:
            try:
                size, _, flags, _ = self._receive((self._header, arrival.view))
            except BlockingIOError as error:
                self.close()
                raise RuntimeError(f"Timed out waiting {self.timeout} for a message on a line") from error
            except OSError as error:
                raise self._lost(error) from error
            if self._header != expected or size != _HEADER.size + arrival.size or flags & socket.MSG_TRUNC:
                self.close()
                raise self._unexpected(size, expected)
        self._received = self._received + 1 & _WHOLE_NUMBER
        arrival.done = True
        self._expected.popleft()

    def settle(self) -> None:
        """Take every message that is expected, whether somebody waits for it or, after Ctrl-C, nobody does."""
        while self._expected:
            self.pull()

    def _unexpected(self, size: int, expected: bytes) -> RuntimeError:
        if size == 0:
            return RuntimeError("Connection closed by peer: the line to it has ended")
        step, number, length = _HEADER.unpack(self._header)
        want = _HEADER.unpack(expected)
        return RuntimeError(
            f"a line brought message {number} of step {step} with {length} bytes, where message {want[1]} of step {want[0]} "
            f"with {want[2]} bytes was due"
        )

    # -- both

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a single wait may take."""
        self.timeout: timedelta = timeout
        seconds = max(timeout.total_seconds(), 1e-3)  # zero would mean no bound
        packed = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
        with suppress(OSError):  # a line that has ended says so at the next message
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, packed)

    def open(self, place: str, hello: bytes) -> None:
        """Reach the rank that listens at the place; if it is gone, the line is closed."""
        try:
            self._socket.connect(place)
            self._socket.send(hello, socket.MSG_NOSIGNAL)
        except OSError:
            self.close()

    def close(self) -> None:
        """End the line for both ranks, and every wait on it."""
        if os.getpid() != self._owner:
            return  # a forked child, of a DataLoader perhaps, only lets go of its copy
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._wake:
            self._wake.notify_all()

    def _lost(self, error: OSError) -> RuntimeError:
        self.close()
        return RuntimeError(f"Connection closed by peer: {error.strerror}")


class Switchboard:
    """The lines of one rank. Every rank of the transport makes one, or has none of its messages go over lines."""

    def __init__(self, rank: int, store: Store) -> None:
        self.rank = rank
        self.lines: dict[int, Line] = {}
        self._store = store
        self._secret = secrets.token_bytes(32)
        self._places: dict[int, tuple[str, bytes] | None] = {}  # by peer: where it listens, and its secret
        self._rounds: dict[int, int] = {}  # by peer: how often this pair has connected
        self._asked: dict[tuple[int, int], socket.socket] = {}  # peers that asked for a line, by rank and round
        self._listener: socket.socket | None = None
        place = ""
        if _HOST:
            place = f"penstock-{secrets.token_hex(16)}"
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listener.bind(f"\0{place}")
            self._listener.listen(socket.SOMAXCONN)
        weakref.finalize(self, _close_all, self.lines, self._asked, self._listener).atexit = False
        self._store.set(f"line/{rank}", json.dumps([_HOST, place, self._secret.hex()]).encode())

    def introduce(self, peers: Iterable[int]) -> None:
        """Learn where these peers, which have sent messages to this rank, can be reached."""
        for peer in peers:
            if peer not in self._places:
                host, place, secret = json.loads(self._store.get(f"line/{peer}", _PATIENCE))
                self._places[peer] = (place, bytes.fromhex(secret)) if host and host == _HOST else None

    def connect(self, peers: Iterable[int]) -> None:
        """Make lines to those of these peers that are on this host. All ranks do so after the same step.

        Whoever has the lower rank asks. Asking never blocks, so no cycle of ranks can wait for each other here. Nothing is
        raised, since the step went well: the line to a peer that has gone in the meantime is closed.
        """
        wanted = [peer for peer in peers if peer not in self.lines and self._places[peer] is not None]
        try:
            for peer in wanted:
                self._rounds[peer] = self._rounds.get(peer, 0) + 1
                if peer > self.rank:
                    self.lines[peer] = self._ask(peer)
            for peer in wanted:
                if peer < self.rank:
                    self.lines[peer] = self._answer(peer)
        finally:
            for peer in wanted:
                if peer not in self.lines:  # Ctrl-C: the other end may have its line, so the next step must fail
                    self.lines[peer] = _dead()

    def begin(self, step: int) -> None:
        for line in self.lines.values():
            line.step = step & _WHOLE_NUMBER

    def close(self) -> None:
        """End all lines."""
        for line in self.lines.values():
            line.close()

    def disconnect(self) -> None:
        """Give up all lines, as all ranks do after the same step."""
        self.close()
        self.lines.clear()

    def _ask(self, peer: int) -> Line:
        address = self._places[peer]
        assert address is not None, "only peers on this host are asked"
        place, secret = address
        line = Line(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        line.open(f"\0{place}", _HELLO.pack(secret, self.rank, self._rounds[peer]))
        return line

    def _answer(self, peer: int) -> Line:
        wanted = peer, self._rounds[peer]
        end = time.monotonic() + _PATIENCE
        assert self._listener is not None, "only a rank that listens is asked"
        while wanted not in self._asked:
            ready, _, _ = select.select([self._listener], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return _dead()
            sock, _ = self._listener.accept()
            who = self._who(sock)
            if who is None:
                sock.close()  # anyone on this host may knock
            else:
                self._asked[who] = sock
        return Line(self._asked.pop(wanted))

    def _who(self, sock: socket.socket) -> tuple[int, int] | None:
        sock.settimeout(2.0)
        try:
            hello = sock.recv(_HELLO.size)
            secret, rank, number = _HELLO.unpack(hello)
        except (OSError, struct.error):
            return None
        return (rank, number) if secrets.compare_digest(secret, self._secret) else None


def _close_all(
    lines: dict[int, Line], asked: dict[tuple[int, int], socket.socket], listener: socket.socket | None
) -> None:
    for line in lines.values():
        line.close()
    for sock in (listener, *asked.values()):
        if sock is not None:
            sock.close()


def _dead() -> Line:
    line = Line(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    line.close()
    return line


def _host() -> str:
    """What is the same for two processes if and only if one can reach the other's sockets; "" where there are no lines."""
    if (
        not hasattr(socket, "AF_UNIX")
        or not hasattr(socket, "SOCK_SEQPACKET")
        or os.environ.get("PENSTOCK_LINES") == "0"
    ):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        network = Path("/proc/self/ns/net").stat()
    except OSError:
        return ""
    return hashlib.sha256(f"{boot}{network.st_dev}:{network.st_ino}:{os.getuid()}".encode()).hexdigest()


_HOST = _host()
_ARRAYS: dict[int, type[Array[Any]]] = {}


def _bytes_of(tensor: Tensor, size: int) -> Array[Any]:
    """The tensor's memory."""
    kind = _ARRAYS.get(size)
    if kind is None:
        kind = _ARRAYS[size] = c_char * size
    return kind.from_address(tensor.data_ptr())
