"""The thread that listens for failures goes on listening, whatever becomes of what it was about to read."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from penstock.comm.store import DistributedStore
from penstock.comm.transport import FailureRecord, failure_key
from penstock.comm.watcher import Watcher
from penstock.health.position import Whereabouts


class Vanishing:
    """A store from which a record is deleted just after somebody has seen it: the rank that posted it began another step."""

    def __init__(self) -> None:
        self.inner: Any = dist.HashStore()
        self.vanished = 0

    def check(self, keys: list[str]) -> bool:
        there = bool(self.inner.check(keys))
        if there and keys == [failure_key(1)] and not self.vanished:
            self.inner.delete_key(keys[0])
            self.vanished += 1
        return there

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Rank:
    """What a watcher needs of a transport."""

    rank, num_ranks, epoch, meetings, store_holder, failed = 0, 2, 1, 0, 1, None
    in_collective, failure_key = None, failure_key(1)
    pulse: Any

    def __init__(self) -> None:
        self.pulse = self
        self.tick = 0.01

    def look(self) -> None:
        """Nobody is silent."""

    def where(self) -> Whereabouts:
        return Whereabouts(0)

    def break_connections(self, record: FailureRecord) -> None:
        raise AssertionError(record)


def test_a_record_that_vanishes_under_its_eyes_does_not_end_the_watcher() -> None:
    """It ended with a traceback, and this rank heard of no failure any more: found by the soak, on a machine that was busy."""
    inner, rank = Vanishing(), Rank()
    inner.inner.set(failure_key(1), FailureRecord(1, cause="the first").encode())
    watcher = Watcher(rank, DistributedStore(inner, 0, 2))
    watcher.begin(1)
    end = time.monotonic() + 30.0
    while not inner.vanished and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.6)  # longer than the look that failed
    inner.inner.set(failure_key(1), FailureRecord(1, cause="the second").encode())
    while rank.failed is None and time.monotonic() < end:
        time.sleep(0.01)
    watcher.end()
    watcher.stop()
    assert inner.vanished == 1
    assert rank.failed == FailureRecord(1, cause="the second")
