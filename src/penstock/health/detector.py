"""What a transport asks of a failure detector, and what a detector may do to a transport.

`penstock.health.monitor.HealthMonitor` is the one of processes. Ranks as threads of one process need none: NoDetector.
"""

from __future__ import annotations

from typing import Protocol

from penstock.health.failure import FailureRecord
from penstock.health.position import Whereabouts


class Monitored(Protocol):
    """One rank's end of a group: a transport, or the replicas of a stage. The detector calls it from its own thread."""

    rank: int
    num_ranks: int
    epoch: int  # number of the current or last step
    meetings: int  # number of the current or last collective
    awaited: int | None  # the rank whose message is waited for
    failed: FailureRecord | None  # of the current step; read between two actions

    def break_connections(self, record: FailureRecord) -> None:
        """End every wait by force."""

    def where(self) -> Whereabouts: ...

    def is_gone(self) -> bool:
        """True when the process group was destroyed: this rank will not come to another step."""


class FailureDetector(Protocol):
    """Tells the ranks of a group of failures, and each rank of theirs."""

    def begin(self, member: Monitored, name: str = "") -> None:
        """A step begins, or a collective of this name: from here on `member.failed` tells of failures."""

    def end(self, member: Monitored) -> None: ...

    def report(self, member: Monitored, record: FailureRecord) -> FailureRecord:
        """Tell all ranks of a failure in the current step. The first one that is known stands, and comes back."""

    def known(self, member: Monitored) -> FailureRecord | None:
        """The failure of the current step that is known by now."""

    def cause(self, member: Monitored, timeout: float) -> FailureRecord | None:
        """After a lost connection: the failure of another rank behind it, if it becomes known in that time."""

    def lost(self, member: Monitored) -> list[FailureRecord]:
        """The ranks that are gone for good, or will not come to the collective that this rank is in."""

    def positions(self, member: Monitored, timeout: float = 3.0) -> list[Whereabouts]:
        """Where the other ranks are, as far as they answer in that time."""

    def leave(self, member: Monitored, *, steps: int, cause: str) -> None:
        """This rank leaves for good after so many steps."""
