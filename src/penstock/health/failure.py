"""The record of a failure: which rank failed, where in its step, and why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from penstock.errors import OutOfMemory, PeerFailed, TransportError
from penstock.health.decoding import read

NOBODY = -1
"""In place of a rank: something outside the ranks of this transport has failed, such as the process that holds the store."""

LONGEST_CAUSE = 8000  # characters that travel; a frame of the monitor has room for them, however they are escaped


class FailureKind(StrEnum):
    """How a rank failed. After the first three its process lives on: the step is drained and the next one works."""

    RAISED = "raised"
    INTERRUPTED = "interrupted"
    OUT_OF_MEMORY = "out of memory"
    TIMEOUT = "timeout"
    LEFT = "left"
    ENDED = "ended"
    STOPPED = "stopped"
    UNREACHABLE = "unreachable"


_PASSING = (FailureKind.RAISED, FailureKind.INTERRUPTED, FailureKind.OUT_OF_MEMORY)


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """The failure of one rank at one action: one rank reports it and all others raise it.

    >>> record = FailureRecord(1, stage=3, action="3F0", microbatch=0, cause="ValueError: no")
    >>> FailureRecord.decode(record.encode()) == record
    True
    >>> str(record.error())
    'rank 1 failed in action 3F0 (stage 3, microbatch 0): ValueError: no'
    """

    rank: int  # or NOBODY, for what is no rank's fault
    stage: int | None = None
    action: str | None = None
    microbatch: int | None = None
    cause: str = ""
    out_of_memory: bool = False
    kind: str = FailureKind.RAISED

    @property
    def fatal(self) -> bool:
        """True if the group of this rank cannot be used any more."""
        return self.kind not in _PASSING

    def encode(self) -> bytes:
        return json.dumps(asdict(self) | {"cause": self.cause[:LONGEST_CAUSE]}).encode()

    @classmethod
    def decode(cls, data: bytes) -> FailureRecord:
        return read(data, cls, "the record of a failure")

    @classmethod
    def of(cls, error: BaseException, rank: int = NOBODY) -> FailureRecord:
        """The record of an error on this rank; of another rank's failure if the error names one."""
        if isinstance(error, PeerFailed):
            return cls(error.rank, error.stage, error.action, error.microbatch, error.cause)
        return cls(rank, cause=f"{type(error).__name__}: {error}")

    def error(self) -> PeerFailed | OutOfMemory | TransportError:
        if self.rank == NOBODY:
            return TransportError(self.cause)
        if self.out_of_memory:
            return OutOfMemory(self.rank, self.action, self.cause)
        return PeerFailed(self.rank, self.stage, self.action, self.microbatch, self.cause)


def split_by_farewell(lost: Sequence[FailureRecord]) -> tuple[dict[int, FailureRecord], list[FailureRecord]]:
    """Of ranks that are gone: the records of those that have left, by rank, and of those that are gone without a word."""
    left: dict[int, FailureRecord] = {}
    for record in lost:
        if record.kind == FailureKind.LEFT:
            left[record.rank] = record
    return left, [record for record in lost if record.rank not in left]
