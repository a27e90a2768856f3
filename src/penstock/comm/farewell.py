"""Who leaves last: the process that holds the store of a job stays until the others have left, who may still read there.

Each process writes down that it is there and, at its end, that it has left. The store belongs to the whole job, so that the
processes of all its groups count, and not only those of the holder's own pipeline.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress

from penstock.comm.store import DistributedStore
from penstock.errors import TransportError
from penstock.health.decoding import read
from penstock.health.processes import has_ended, own_process

_NAP = 0.02


class Farewell:
    """Of one process, in the store of its job. ``holds``: that store ends with this process."""

    def __init__(self, store: DistributedStore, rank: int, num_ranks: int, *, holds: bool) -> None:
        self._store, self._rank, self._num_ranks, self.holds = store, rank, num_ranks, holds
        store.set(f"here/{rank}", json.dumps(own_process()).encode())

    def say(self) -> None:
        with suppress(TransportError):
            self._store.set(f"left/{self._rank}", b"")

    def see_off(self, end: float) -> None:
        """Wait for all that are there and whose processes live, until the time `end` at the latest."""
        with suppress(TransportError):
            there = [rank for rank in range(self._num_ranks) if self._store.check(f"here/{rank}")]
            while (there := [rank for rank in there if not self._has_left(rank)]) and time.monotonic() < end:
                time.sleep(_NAP)

    def _has_left(self, rank: int) -> bool:
        return self._store.check(f"left/{rank}") or has_ended(*self._process(rank))

    def _process(self, rank: int) -> tuple[str, int, str]:
        return read(self._store.get(f"here/{rank}", 1.0), tuple[str, int, str], f"the process of rank {rank}")
