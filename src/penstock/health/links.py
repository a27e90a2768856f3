"""Links: kept-alive TCP connections between processes, over which they send small frames.

The kernel is the heartbeat. It ends a link when the process at its other end ends, answers for a process that only computes,
and gives up when the other host does not answer any more.

    listener = Listener("10.0.0.5", heartbeat=10.0)
    link = dial(peer, listener.endpoint, heartbeat=10.0)      # peer: the Endpoint of another process
    link.send(FrameKind.FAILURE, b"...")                          # never blocks
    for kind, payload in link.frames(): ...                   # EOFError at the end

A frame is a kind and a length (`<BI`) followed by at most 64 KB. The first frame of the process that dials is HELLO, signed with
the key of the process that listens; whoever sends anything else is disconnected.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import IntEnum

from penstock.health.decoding import loads, reading
from penstock.health.processes import own_process

_HEADER = struct.Struct("<BI")
_LARGEST = 1 << 16  # bytes of a payload
_SECONDS = 2.0  # for a connection to be made, and for a stranger to send its HELLO
_STRANGERS = 64  # that may be connected without a HELLO
_TOKEN = 16  # bytes


class FrameKind(IntEnum):
    """The kind of a frame."""

    HELLO = 1  # token of the process that dials, signed
    JOIN = 2  # group, rank in it, endpoint of the sender
    FAILURE = 3  # a failure, forwarded once by each process
    BYE = 4  # group, rank in it, steps done, cause
    ASK = 5  # question, group; forwarded
    ANSWER = 6  # question, position; goes back along the links of its question
    STATE = 7  # group, rank, steps done, number and name of the collective that it waits in; no name: it goes on


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a process listens, and what others of its host need to read its state."""

    token: str  # of the process, random
    address: str
    port: int
    key: str  # with which a HELLO is signed
    host: str = ""
    process: int = 0
    started: str = ""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes, whose: str) -> Endpoint:
        """The result of `encode`; anything else is a TransportError that names `whose` it is."""
        with reading(f"the endpoint of {whose}"):
            found = loads(data, cls)
            ipaddress.ip_address(found.address.partition("%")[0])  # no name that would have to be looked up
            if not 0 < found.port < 1 << 16 or found.process < 0:
                raise ValueError(f"{found.port} is no port, or {found.process} no process")
            if len(bytes.fromhex(found.token)) != _TOKEN or len(bytes.fromhex(found.key)) != 32:
                raise ValueError("its token or key has another length")
            return found


class HealthLink:
    """One connection to another process. Any thread may send; one thread reads."""

    def __init__(self, sock: socket.socket, token: str, *, heartbeat: float) -> None:
        sock.setblocking(False)
        keep_alive(sock, heartbeat)
        self.socket, self.token = sock, token  # "": the other end has not sent its HELLO
        self.since = time.monotonic()
        self.endpoint: Endpoint | None = None
        self._lock = threading.Lock()
        self._in, self._out = bytearray(), bytearray()

    def send(self, kind: FrameKind, payload: bytes) -> None:
        """Send a frame, or keep it until there is room; a link that has ended says so where it is read."""
        with self._lock:
            self._out += _HEADER.pack(kind, len(payload)) + payload
        self.flush()

    def flush(self) -> bool:
        """Send what was kept; True when nothing is left."""
        with self._lock, suppress(OSError):
            while self._out:
                del self._out[: self.socket.send(self._out, socket.MSG_NOSIGNAL)]
        return not self._out

    def frames(self) -> Iterator[tuple[FrameKind, bytes]]:
        """The frames that have come. EOFError, OSError: it has ended; ValueError: what came is no frame."""
        ended: Exception | None = None
        try:
            while data := self.socket.recv(_LARGEST):
                self._in += data
            ended = EOFError()
        except BlockingIOError:
            pass
        except OSError as error:  # a reset; frames that came before it count
            ended = error
        while len(self._in) >= _HEADER.size:
            kind, size = _HEADER.unpack_from(self._in)
            if size > _LARGEST or (not self.token and (kind, size) != (FrameKind.HELLO, 2 * _TOKEN)):
                raise ValueError(f"a frame of kind {kind} with {size} bytes")
            if len(self._in) < _HEADER.size + size:
                break
            payload = bytes(self._in[_HEADER.size : _HEADER.size + size])
            del self._in[: _HEADER.size + size]
            yield FrameKind(kind), payload
        if ended is not None:
            raise ended

    def close(self) -> None:
        """End the link after what was sent; the other end reads all of it first."""
        self.flush()
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        self.socket.close()


class Listener:
    """Where other processes reach this one."""

    def __init__(self, address: str, *, heartbeat: float) -> None:
        self.heartbeat = heartbeat
        self._key = secrets.token_bytes(32)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.bind((address, 0))
        self.socket.listen(socket.SOMAXCONN)
        self.socket.setblocking(False)
        bound, port = self.socket.getsockname()[:2]
        token = secrets.token_hex(_TOKEN)
        self.endpoint = Endpoint(token, str(bound), int(port), self._key.hex(), *own_process())

    def accept(self) -> Iterator[HealthLink]:
        """The connections that have come; what they send first is their HELLO."""
        with suppress(OSError):
            while True:
                yield HealthLink(self.socket.accept()[0], "", heartbeat=self.heartbeat)

    def welcome(self, link: HealthLink, hello: bytes) -> bool:
        """Read the HELLO of a stranger; False if it is none of ours."""
        token, signature = hello[:_TOKEN], hello[_TOKEN:]
        if not secrets.compare_digest(signature, _signature(self._key, token)):
            return False
        link.token = token.hex()
        return True

    def tired_of(self, strangers: list[HealthLink]) -> list[HealthLink]:
        """Of the connections without a HELLO those that are to be ended: too old, or too many."""
        now = time.monotonic()
        return [link for at, link in enumerate(strangers) if at >= _STRANGERS or now > link.since + _SECONDS]


def dial(peer: Endpoint, own: Endpoint, *, heartbeat: float) -> HealthLink:
    """Connect to a process; at most two seconds. OSError if that cannot be done; ConnectionRefusedError: it has ended."""
    sock = socket.create_connection((peer.address, peer.port), timeout=_SECONDS)
    link = HealthLink(sock, peer.token, heartbeat=heartbeat)
    link.endpoint = peer
    token = bytes.fromhex(own.token)
    link.send(FrameKind.HELLO, token + _signature(bytes.fromhex(peer.key), token))
    return link


def keep_alive(sock: socket.socket, heartbeat: float) -> None:
    """Have the kernel ask three times in a heartbeat whether the other host is there; 0: never."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not heartbeat:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    third = heartbeat / 3
    options = {"TCP_KEEPIDLE": third, "TCP_KEEPINTVL": third, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 1000 * heartbeat}
    for name, value in options.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), max(1, int(value)))


def _signature(key: bytes, token: bytes) -> bytes:
    return hashlib.blake2b(token, key=key, digest_size=_TOKEN).digest()
