"""One rank's membership in a group, as its monitor sees it: which of the failures that were heard count now, and what is due."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.health.decoding import read
from penstock.health.detector import Monitored
from penstock.health.failure import FailureKind, FailureRecord

FOREVER = 1 << 62
_AT_ONCE = (FailureKind.STOPPED, FailureKind.UNREACHABLE)  # a heartbeat has passed already
_GRACE = 1.5  # seconds for a step to end by itself after a failure, before its waits are ended by force
_LAST_MESSAGES = 1.0  # and after the end of a process, whose last messages may be all that was missing


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure in a group, which counts from step `first` to step `last`."""

    group: str
    first: int
    last: int
    record: FailureRecord

    @property
    def key(self) -> tuple[str, int, int, int, str]:
        return self.group, self.first, self.last, self.record.rank, self.record.kind

    def encode(self) -> bytes:
        return json.dumps([self.group, self.first, self.last, self.record.encode().decode()]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Failure:
        group, first, last, record = read(data, tuple[str, int, int, str], "a failure")
        return cls(group, first, last, FailureRecord.decode(record.encode()))


@dataclass(slots=True)
class Heard:
    """A failure that this process knows of."""

    failure: Failure
    at: float  # time
    flooded: bool = False


class Membership:
    """The state of one member. ``activity``: None between steps, "" in a step, else the name of a collective."""

    def __init__(self, member: Monitored, group: str) -> None:
        self.group, self.rank, self.num_ranks = group, member.rank, member.num_ranks
        self._member = weakref.ref(member)
        self.epoch = member.epoch
        self.activity: str | None = None
        self.since = 0.0  # time at which it began
        self.state_sent = False
        self.interrupts = 0
        self.took_signals = False  # its step or collective has them written to the monitor
        self._aborted = False
        self._forgotten: set[tuple[str, int, int, int, str]] = set()

    @property
    def member(self) -> Monitored | None:
        return self._member()

    def begin(self, activity: str, epoch: int) -> None:
        self.activity, self.epoch, self.since = activity, epoch, time.monotonic()
        self.interrupts, self.state_sent, self._aborted = 0, False, False

    def forget(self, keys: Iterable[tuple[str, int, int, int, str]]) -> None:
        """Let these failures not count any more: the group has been connected again."""
        self._forgotten.update(keys)

    def counts(self, failure: Failure, awaited: int | None) -> bool:
        """True if a failure concerns what this rank does now."""
        if failure.group != self.group or failure.key in self._forgotten:
            return False
        if self.activity and awaited == failure.record.rank and failure.record.fatal:
            return True
        return failure.first <= self.epoch <= failure.last

    def is_lost(self, failure: Failure) -> bool:
        """True if it names another rank that is gone for good, or will not come to the collective that this rank is in."""
        mine = failure.group == self.group and failure.key not in self._forgotten
        lasts = failure.last == FOREVER or failure.first <= self.epoch <= failure.last
        return mine and lasts and failure.record.fatal and failure.record.rank != self.rank

    def due(self, heard: Heard, now: float) -> FailureRecord | None:
        """Tell the member of a failure of another rank; the record is returned if its waits are to be ended now."""
        member, record = self.member, heard.failure.record
        if member is None or self.activity is None or record.rank == self.rank:
            return None
        if not self.counts(heard.failure, member.awaited):
            return None
        waiting = now - max(heard.at, self.since)
        ended = record.kind == FailureKind.ENDED
        if self.activity == "":
            if member.failed is None and (not ended or waiting > _LAST_MESSAGES):
                member.failed = record
        elif not self._stops_collective(heard.failure, member.awaited):
            return None
        grace = 0.0 if record.kind in _AT_ONCE else _LAST_MESSAGES if ended else _GRACE
        if self._aborted or not record.fatal or waiting < grace:
            return None
        self._aborted = True
        return member.failed or record

    @staticmethod
    def _stops_collective(failure: Failure, awaited: int | None) -> bool:
        """Others may have done their part before they ended, unless they are the ones who are waited for."""
        return failure.record.rank == awaited or failure.record.kind in _AT_ONCE or failure.last < FOREVER
