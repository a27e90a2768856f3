"""The store of a process group, under penstock's own prefix, with waits that end and that Ctrl-C reaches."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from penstock.comm.transport import FailureRecord
from penstock.errors import PeerFailed, StepTimeout, TransportError

_FIRST_NAP, _LONGEST_NAP = 0.0005, 0.02
_BETWEEN_LOOKS = 0.25  # seconds between looks for ranks that have left, while waiting


@dataclass(frozen=True, slots=True)
class Departure:
    """A rank has left for good after ``epoch`` steps: nobody need wait for it in a later one."""

    rank: int
    epoch: int
    cause: str


class DistributedStore:
    """A c10d store as seen by penstock. A wait polls: a blocking call would keep Ctrl-C and other threads waiting."""

    def __init__(self, store: Any, rank: int, num_ranks: int) -> None:
        self._store = store  # a c10d Store; its stubs know neither clone nor bytes
        self._rank, self._num_ranks = rank, num_ranks

    def clone(self) -> DistributedStore:
        """The same values over a connection of its own, for another thread."""
        return DistributedStore(self._store.clone(), self._rank, self._num_ranks)

    def set(self, key: str, value: bytes) -> None:
        with _reachable():
            self._store.set(key, value)

    def first(self, key: str, value: bytes) -> bytes:
        with _reachable():
            return bytes(self._store.compare_set(key, "", value))

    def get(self, key: str, timeout: float) -> bytes:
        end, nap = time.monotonic() + timeout, _FIRST_NAP
        while not self.check(key):
            if time.monotonic() > end:
                raise StepTimeout(f"rank {self._rank} waited {timeout:g} s for {key!r} in the store")
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)
        with _reachable():
            return bytes(self._store.get(key))

    def get_all(self, folder: str, timeout: float, *, posts: str) -> list[bytes]:
        keys = [f"{folder}/{rank}" for rank in range(self._num_ranks)]
        end, look, nap = time.monotonic() + timeout, time.monotonic() + _BETWEEN_LOOKS, _FIRST_NAP
        with _reachable():
            while not self._store.check(keys):
                now = time.monotonic()
                if now > min(look, end):
                    self._look_for_absent(folder, "" if now <= end else f"waited {timeout:g} s for {posts}")
                    look = now + _BETWEEN_LOOKS
                time.sleep(nap)
                nap = min(2 * nap, _LONGEST_NAP)
            return [bytes(value) for value in self._store.multi_get(keys)]

    def check(self, key: str) -> bool:
        with _reachable():
            return bool(self._store.check([key]))

    def add(self, key: str, number: int) -> int:
        with _reachable():
            return int(self._store.add(key, number))

    def delete(self, key: str) -> None:
        with _reachable():
            self._store.delete_key(key)

    # -- departures

    def depart(self, departure: Departure) -> None:
        self.set(f"departed/{departure.rank}", json.dumps([departure.epoch, departure.cause]).encode())
        self.add("departures", 1)

    def departures(self) -> list[Departure]:
        """The ranks that have left; one request as long as nobody has."""
        if not self.check("departures"):
            return []
        gone = [rank for rank in range(self._num_ranks) if self.check(f"departed/{rank}")]
        return [Departure(rank, *json.loads(self.get(f"departed/{rank}", 1.0))) for rank in gone]

    # -- meetings that cannot come about

    def decline(self, folder: str, record: FailureRecord) -> None:
        """Tell those who wait at the meeting that this rank is elsewhere."""
        self.first(f"{folder}/declined", record.encode())

    def _look_for_absent(self, folder: str, waited: str) -> None:
        departures = self.departures()
        absent = [rank for rank in range(self._num_ranks) if not self.check(f"{folder}/{rank}")]
        for departure in departures:
            if departure.rank in absent:
                raise PeerFailed(departure.rank, None, None, None, departure.cause)
        if self.check(f"{folder}/declined"):
            raise FailureRecord.decode(self.get(f"{folder}/declined", 1.0)).error()
        if waited and absent:
            names = ("rank " if len(absent) == 1 else "ranks ") + ", ".join(map(str, absent))
            raise StepTimeout(f"rank {self._rank} {waited}, which {names} never sent")


@contextmanager
def _reachable() -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise TransportError(
            f"the store of the process group does not answer ({error}); the process that holds it, usually that of "
            "rank 0, has ended or cannot be reached"
        ) from error
