"""Rendezvous: ranks of a group post their endpoints in the store, and connect to their neighbours there.

The neighbours of a rank are those of a ring and of a binary tree, four of them and at most five. The graph stays connected
without any one rank, and the longest path between two ranks grows with the logarithm of their number.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from contextlib import suppress
from typing import Protocol

from penstock.errors import PenstockError
from penstock.health.links import Endpoint

_INTERFACE_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
_SHORTEST = 0.5  # seconds; a shorter heartbeat would be more looks than work


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


class RendezvousStore(Protocol):
    """The calls of a store that a rendezvous makes."""

    def set(self, key: str, value: bytes) -> None: ...

    def first(self, key: str, value: bytes) -> bytes: ...

    def check(self, key: str) -> bool: ...

    def get(self, key: str, timeout: float) -> bytes: ...


def neighbours(rank: int, size: int) -> list[int]:
    """The ranks to which a rank has links.

    >>> neighbours(5, 16)
    [2, 4, 6, 11, 12]
    """
    found = {(rank - 1) % size, (rank + 1) % size, 2 * rank + 1, 2 * rank + 2}
    if rank:
        found.add((rank - 1) // 2)
    return sorted(other for other in found if other < size and other != rank)


def group_in_job(store: RendezvousStore, group: str) -> str:
    """A name of the group that no group of another job has: a process may be in several jobs, one after another."""
    return f"{group}/{store.first('group', secrets.token_hex(8).encode()).decode(errors='replace')}"


def post(store: RendezvousStore, rank: int, endpoint: Endpoint) -> None:
    store.set(f"endpoint/{rank}", endpoint.encode())


def posted(store: RendezvousStore, rank: int) -> Endpoint | None:
    """The endpoint of a rank, None if it has not posted one. A rank posts its own first and then looks for those of its
    neighbours: of two ranks at least one finds the other."""
    key = f"endpoint/{rank}"
    if not store.check(key):
        return None
    return Endpoint.decode(store.get(key, 10.0), f"rank {rank}")


def own_address(host: str | None, port: int | None) -> str:
    """The address at which other hosts reach this one: of the interface that gloo is told to use, on the route to the job's
    store, or of this host's name; without any, loopback."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    with suppress(OSError, ImportError):
        return _address_of(interface)
    with suppress(OSError):
        family, kind, _, _, place = socket.getaddrinfo(host or socket.gethostname(), port or 9, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def _address_of(interface: str) -> str:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        found = fcntl.ioctl(probe, _INTERFACE_ADDRESS, struct.pack("256s", interface.encode()[:15]))
    return socket.inet_ntoa(found[20:24])
