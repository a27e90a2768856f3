"""Lines: the way of all messages between two ranks; small ones go over a socket if both ranks are on one host.

A backend of torch.distributed hands every message to a thread of its own, on both sides; for a small message the threads'
waking up costs far more than the message. Over a socket that the ranks' main threads use themselves a message is one system
call for the sender and one for the receiver. The socket keeps packets apart (SOCK_SEQPACKET), so a message arrives whole or
not at all, whatever interrupts. Both ends know a message's size, so they choose alike; a header with step, number and size is
held against what is due, so a message is never taken for another.

    line = Line(backend_send, backend_receive)      # all messages go by the backend ...
    line.attach(sock)                               # ... and small ones over the socket from here on, on both ends
    line.send([tensor])                             # None: it is sent; else what to wait for
    line.receive([buffer]).wait()
    line.detach()                                   # back to the backend alone, on both ends
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from ctypes import Array, c_char
from datetime import timedelta

from torch import Tensor

from penstock.comm.messages import Receive, Send, Work

LIMIT = 1 << 17
"""Bytes of the largest message that goes over a socket. A larger one gains from a backend's thread, which overlaps it."""

_HEADER = struct.Struct("<III")  # step, number of the message on the line, size: what no correct message differs in
_AT_ONCE, _CUT_OFF = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL), int(socket.MSG_TRUNC)  # numbers, which are quicker
_TIMEVAL = struct.Struct("ll")
_WHOLE_NUMBER = 0xFFFFFFFF
_BUFFER = 1 << 22  # bytes that may be on their way; the system gives less if it must
_LONGEST = timedelta(minutes=30)  # that a wait may take which brings no bound of its own, as in a process group


class Arrival:
    """A message that is expected over a socket. Those of a line arrive in the order in which they are expected."""

    __slots__ = ("_line", "done", "header", "size", "tensor", "view")

    def __init__(self, line: Line, tensor: Tensor, size: int, header: bytes) -> None:
        self._line = line
        self.tensor = tensor  # keeps the memory alive that `view` shows
        self.size = size
        self.header = header  # that it will have
        self.view = _bytes_of(tensor, size)
        self.done = False

    def wait(self, timeout: timedelta | None = None, /) -> None:
        """Wait for the message; Ctrl-C is raised when it is there, as from the waits of a backend."""
        line = self._line
        if timeout is not None and timeout is not line.timeout:
            line.set_timeout(timeout)
        interrupt: KeyboardInterrupt | None = None
        while not self.done:
            try:
                line.pull()
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


class Line:
    """One rank's end of the way to another rank."""

    def __init__(self, send: Send, receive: Receive) -> None:
        self._send_by_backend, self._receive_by_backend = send, receive
        self.limit = -1  # bytes of the largest message for the socket; -1: there is none
        self.step = 0  # goes with every message, so that none is ever taken for one of another step
        self.timeout = _LONGEST
        self._socket: socket.socket | None = None
        self._live: socket.socket | None = None  # the socket, as long as nobody has closed it
        self._closing: Callable[[], object] | None = None
        self._wake = threading.Condition()
        self._expected: deque[Arrival] = deque()

    def attach(self, sock: socket.socket) -> None:
        """Use the socket, whose other end the other rank attaches."""
        sock.settimeout(None)  # the kernel keeps the bound: a wait is one call
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self._socket = self._live = sock
        self._closing = closing = weakref.finalize(self, sock.close)
        closing.atexit = False
        self._send, self._receive = sock.sendmsg, sock.recvmsg_into
        self._sent = self._awaited = 0
        self._expected.clear()
        self._header = bytearray(_HEADER.size)
        self._overflow: deque[bytes] = deque()  # what the socket would not take yet, in order; a thread sends it
        self._thread: threading.Thread | None = None
        self._owner = os.getpid()
        self.set_timeout(self.timeout)
        self.limit = LIMIT

    def detach(self) -> None:
        """Let go of the socket, whatever is on it."""
        if self._socket is not None:
            self.close()
            self.limit = -1
            self._expected.clear()
            self._socket = None
            if self._closing is not None:
                self._closing()

    # -- sending

    def send(self, tensors: list[Tensor]) -> Work | None:
        """Send a contiguous tensor. None: it has been sent, or copied, and may be changed."""
        tensor = tensors[0]
        size = tensor.nbytes
        if size > self.limit:
            return self._send_by_backend(tensors)
        number = self._sent = self._sent + 1 & _WHOLE_NUMBER
        packet = (_HEADER.pack(self.step, number, size), _bytes_of(tensor, size))
        if not self._overflow:
            try:
                self._send(packet, (), _AT_ONCE)
            except BlockingIOError:
                pass
            except OSError as error:
                raise self._lost(error) from error
            else:
                return None
        self._defer(b"".join(packet))
        return None

    def _defer(self, packet: bytes) -> None:
        """The other end is far behind: a thread sends the packet when there is room, and this rank goes on."""
        if self._live is None:
            raise RuntimeError("Connection closed: the line has ended")
        with self._wake:
            self._overflow.append(packet)
            self._wake.notify()
        if self._thread is None:
            arguments = self._live, self._overflow
            self._thread = threading.Thread(target=self._catch_up, args=arguments, name="penstock line", daemon=True)
            self._thread.start()

    def _catch_up(self, sock: socket.socket, overflow: deque[bytes]) -> None:
        while True:
            with self._wake:
                while not overflow and sock is self._live:
                    self._wake.wait()
                if sock is not self._live:
                    return
                packet = overflow[0]
            try:
                sock.send(packet, socket.MSG_NOSIGNAL)
            except OSError:
                return  # the next message, of either side, finds the socket closed
            with self._wake:
                overflow.popleft()

    # -- receiving

    def receive(self, tensors: list[Tensor]) -> Work:
        """The next message fills the tensor, which is contiguous and has its size."""
        tensor = tensors[0]
        size = tensor.nbytes
        if size > self.limit:
            return self._receive_by_backend(tensors)
        number = self._awaited = self._awaited + 1 & _WHOLE_NUMBER
        arrival = Arrival(self, tensor, size, _HEADER.pack(self.step, number, size))
        self._expected.append(arrival)
        return arrival

    def pull(self) -> None:
        """Take the next message from the socket; wait for it if need be."""
        arrival = self._expected[0]
        # Ctrl-C can break in anywhere: what is done already is not done again.
        if not arrival.done and self._header != arrival.header:
            try:
                size, _, flags, _ = self._receive((self._header, arrival.view))
            except BlockingIOError as error:
                self.close()
                raise RuntimeError(f"Timed out waiting {self.timeout} for a message on a line") from error
            except OSError as error:
                raise self._lost(error) from error
            if self._header != arrival.header or size != _HEADER.size + arrival.size or flags & _CUT_OFF:
                self.close()
                raise self._unexpected(size, arrival.header)
        arrival.done = True
        self._expected.popleft()

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
        self.timeout = timeout
        seconds = max(timeout.total_seconds(), 1e-3)  # zero would mean no bound
        packed = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
        with suppress(OSError):  # a socket that has ended says so at the next message
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, packed)  # type: ignore[union-attr]

    def close(self) -> None:
        """End the socket for both ranks, and every wait on it: small messages cannot be sent any more."""
        sock = self._socket
        if sock is None or os.getpid() != self._owner:
            return  # a forked child, of a DataLoader perhaps, only lets go of its copy
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        with self._wake:
            self._live = None
            self._wake.notify_all()

    def _lost(self, error: OSError) -> RuntimeError:
        self.close()
        return RuntimeError(f"Connection closed by peer: {error.strerror}")


_ARRAYS: dict[int, type[Array[c_char]]] = {}


def _bytes_of(tensor: Tensor, size: int) -> Array[c_char]:
    """The tensor's memory."""
    kind = _ARRAYS.get(size)
    if kind is None:
        kind = _ARRAYS[size] = c_char * size
    return kind.from_address(tensor.data_ptr())
