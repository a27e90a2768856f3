"""The store of a process group, under penstock's own prefix, with waits that end and that Ctrl-C reaches."""

from __future__ import annotations

import os
import re
import socket
import struct
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from penstock.comm.hushed import hushed
from penstock.errors import StepTimeout, TransportError

_FIRST_NAP, _LONGEST_NAP = 0.0005, 0.02
_BETWEEN_LOOKS = 0.25  # seconds between two looks, while waiting


def innermost(store: object) -> object:
    """The store under all prefixes."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def cloned(store: PrefixStore) -> PrefixStore:
    """The same values over a connection of its own."""
    made: PrefixStore = store.clone()  # type: ignore[attr-defined]  # its stubs lack it
    return made


class DistributedStore:
    """A c10d store as seen by penstock. A wait polls: a blocking call would keep Ctrl-C and other threads waiting.

    ``bound``   seconds that a single call may take; 0: as many as it takes. The connection is then one of our own.
    ``everybody``  asked when a wait has run out: a table of where all ranks are. Held weakly, it is the owner's.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int, *, bound: float = 0.0) -> None:
        self._store: Any = store  # its stubs know neither clone nor bytes
        self._rank, self._num_ranks = rank, num_ranks
        self._bound = bound
        self._guard = StoreGuard(store, bound) if bound else None
        self.gone: list[str] = []  # why no call is made any more, if that is so; all clones share it
        self.everybody: weakref.WeakMethod[Callable[[], str]] | None = None

    def clone(self) -> DistributedStore:
        """The same values over a connection of its own, for another thread."""
        made = DistributedStore(self._store.clone(), self._rank, self._num_ranks, bound=self._bound)
        made.gone = self.gone
        return made

    def beside(self, store: Store) -> DistributedStore:
        """Other values over the same connection."""
        made = DistributedStore(store, self._rank, self._num_ranks)
        made._guard, made.gone = self._guard, self.gone
        return made

    def _call(self, name: str, *args: object) -> Any:
        """Call torch's store. Once it is gone nobody asks it again: torch would print a page for each call."""
        if not self.gone and self._guard is not None and self._guard.closed():
            self.gone.append("its process has ended")
        if self.gone:
            raise self._lost()
        try:
            with hushed():
                return getattr(self._store, name)(*args)
        except dist.DistError as error:
            self.gone.append(str(error).partition("\n")[0])
            raise self._lost() from error

    def _lost(self) -> TransportError:
        return TransportError(
            f"the store of the process group does not answer ({self.gone[0]}); the process that holds it, that of the "
            "job's rank 0 or of its launcher, has ended or cannot be reached. Start the job again, from a checkpoint"
        )

    def set(self, key: str, value: bytes) -> None:
        self._call("set", key, value)

    def first(self, key: str, value: bytes) -> bytes:
        return bytes(self._call("compare_set", key, "", value))

    def get(self, key: str, timeout: float, *, look: Callable[[], object] | None = None) -> bytes:
        """`look` is asked now and then; it may raise."""
        end, between, nap = time.monotonic() + timeout, time.monotonic() + _BETWEEN_LOOKS, _FIRST_NAP
        while not self.check(key):
            now = time.monotonic()
            if look is not None and now > between:
                look()
                between = now + _BETWEEN_LOOKS
            if now > end:
                raise self._late(f"rank {self._rank} waited {timeout:g} s for {key!r} in the store")
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)
        return bytes(self._call("get", key))

    def check(self, key: str) -> bool:
        return bool(self._call("check", [key]))

    def add(self, key: str, number: int) -> int:
        return int(self._call("add", key, number))

    def delete(self, key: str) -> None:
        self._call("delete_key", key)

    def _late(self, text: str) -> StepTimeout:
        ask = None if self.everybody is None else self.everybody()
        return StepTimeout(text if ask is None else f"{text}\n{ask()}")


class StoreGuard:
    """Looks after the connection of a TCPStore: no answer may take longer than ``bound`` seconds, nor may its end go
    unnoticed. Torch has no call for either, but its text of a store names the descriptor."""

    def __init__(self, store: Store, bound: float) -> None:
        found = re.search(r"client=.*?SocketImpl\(fd=(\d+)", str(innermost(store)))
        self._socket: socket.socket | None = None
        if found is None:
            return  # a store of another kind, such as a file
        self._socket = sock = socket.socket(fileno=os.dup(int(found[1])))
        weakref.finalize(self, sock.close)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(bound), int(bound % 1 * 1e6)))
        keep_alive(sock, TCP_KEEPIDLE=bound, TCP_KEEPINTVL=bound / 3, TCP_USER_TIMEOUT=1000 * bound)

    def closed(self) -> bool:
        """Whether the other end is gone: between calls there is nothing to read but its end."""
        if self._socket is None:
            return False
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


def keep_alive(sock: socket.socket, **options: float) -> None:
    """Have the kernel ask whether the other end is there, as these options of TCP say, of those that it has."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), max(1, int(value)))
