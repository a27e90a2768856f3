"""What the runtime asks of a transport: messages between ranks, small facts through a store, and news of failures.

The hot path costs no Python frame: ``sender``, ``receiver`` and ``waiter`` are resolved once, before the first step,
and are C callables over torch.distributed.

    send, recv, wait = transport.sender(1), transport.receiver(1), transport.waiter()
    posted = recv([buffer]), send([tensor])
    for work in posted:
        wait(work)                     # raises what the backend raises ...
    transport.explain(error, ...)      # ... which becomes PeerFailed, StepTimeout or TransportError here, when needed
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from penstock.dtypes import dtype_name
from penstock.errors import PeerFailed, PenstockError, RanksDisagree, ShapeError


class Work(Protocol):
    """A message on its way. It is waited for exactly once."""

    def wait(self, timeout: timedelta = ..., /) -> object: ...


Send: TypeAlias = "Callable[[list[Tensor]], Work | None]"
"""Sends its only tensor, which is contiguous. None: there is nothing to wait for, and the tensor may be changed."""
Receive: TypeAlias = "Callable[[list[Tensor]], Work]"
"""Receives into its only tensor, which is contiguous and has the shape and type of what comes."""


class Store(Protocol):
    """Small values that every rank of the transport can see. No wait is without a bound."""

    def set(self, key: str, value: bytes) -> None: ...

    def first(self, key: str, value: bytes) -> bytes:
        """Set the key unless it is there already; whatever it holds now comes back."""
        ...

    def get(self, key: str, timeout: float) -> bytes:
        """Wait for the key. StepTimeout names it when it never comes."""
        ...

    def get_all(self, folder: str, timeout: float, *, posts: str) -> list[bytes]:
        """Wait for "folder/0", "folder/1", ..., one from each rank. ``posts`` says in an error what they are."""
        ...

    def check(self, key: str) -> bool: ...

    def add(self, key: str, number: int) -> int: ...

    def delete(self, key: str) -> None: ...


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """Which rank failed, at which action, and why: what one rank posts and all others raise.

    >>> record = FailureRecord(1, stage=3, action="3F0", microbatch=0, cause="ValueError: no")
    >>> FailureRecord.decode(record.encode()) == record
    True
    >>> str(record.error())
    'rank 1 failed in action 3F0 (stage 3, microbatch 0): ValueError: no'
    """

    rank: int
    stage: int | None = None
    action: str | None = None
    microbatch: int | None = None
    cause: str = ""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> FailureRecord:
        return cls(**json.loads(data))

    @classmethod
    def of(cls, error: PeerFailed) -> FailureRecord:
        return cls(error.rank, error.stage, error.action, error.microbatch, error.cause)

    def error(self) -> PeerFailed:
        return PeerFailed(self.rank, self.stage, self.action, self.microbatch, self.cause)


class Transport(ABC):
    """One rank's end of the messages between ``num_ranks`` ranks.

    Messages of one ordered pair of ranks arrive in the order in which they are sent, and the k-th send meets the k-th
    receive. Tensors are contiguous, and a buffer has the shape and the type of what arrives in it.

    ``timeout``  seconds that any single wait may take; waiters taken before it is set keep their bound.
    ``failed``   during a step: the failure that some other rank posted, or None. A plain attribute, cheap to read.
    ``epoch``    the number of the current or last step, the same on every rank. A failure belongs to an epoch.
    ``meetings`` how often all ranks met (gather, agree), likewise.
    """

    rank: int
    num_ranks: int
    store: Store
    timeout: float
    device: torch.device
    failed: FailureRecord | None = None
    epoch: int = 0
    meetings: int = 0

    # -- messages

    def connect(self, peers: Collection[int]) -> None:  # noqa: B027  most have nothing to do
        """Get the ways to these peers ready. All ranks call it after the same meeting, each with those that call it with
        this one, and before the first message that must be quick."""

    @abstractmethod
    def sender(self, peer: int) -> Send:
        """The call that sends a tensor to ``peer``."""

    @abstractmethod
    def receiver(self, peer: int) -> Receive:
        """The call that receives a tensor from ``peer``."""

    @abstractmethod
    def waiter(self) -> Callable[[Work], object]:
        """The call that waits for a message, at most ``timeout`` seconds."""

    @abstractmethod
    def explain(self, error: Exception, *, peer: int, what: str) -> PenstockError:
        """What an error of a posted or awaited message means: PeerFailed, StepTimeout or TransportError.

        ``what`` says what was waited for ("the input of 3F0"). The failure is posted, so that the others hear of it.
        """

    def isend(self, tensor: Tensor, peer: int) -> Work:
        """Send, with every error explained; for code that does not count microseconds."""
        return self._checked(self.sender(peer), tensor, peer, what=f"a send of {_kind_of(tensor)}")

    def irecv(self, tensor: Tensor, peer: int) -> Work:
        """Receive, with every error explained; for code that does not count microseconds."""
        return self._checked(self.receiver(peer), tensor, peer, what=f"a receive of {_kind_of(tensor)}")

    def _checked(self, post: Send | Receive, tensor: Tensor, peer: int, *, what: str) -> Work:
        if not tensor.is_contiguous():
            raise ShapeError(f"{what}, which is not contiguous; write tensor.contiguous()")
        try:
            work = post([tensor])
        except (RuntimeError, ValueError) as error:
            raise self.explain(error, peer=peer, what=what) from error
        return _CheckedWork(self, work, peer, what=what)

    # -- steps and failures

    def begin_step(self) -> int:
        """Begin the next epoch: from here on ``failed`` tells of other ranks' failures in it."""
        self.epoch += 1
        self.failed = None
        self._watch()
        return self.epoch

    def end_step(self, *, fine: bool = True) -> None:
        """End the epoch, however the step ended; ``fine`` says whether it went well, which all ranks say alike."""
        self._unwatch(fine=fine)

    @abstractmethod
    def _watch(self) -> None: ...

    @abstractmethod
    def _unwatch(self, *, fine: bool) -> None: ...

    def report_failure(self, record: FailureRecord, *, epoch: int | None = None) -> FailureRecord:
        """Post a failure of this rank in the epoch. The first one stands, and comes back."""
        epoch = self.epoch if epoch is None else epoch
        return FailureRecord.decode(self.store.first(failure_key(epoch), record.encode()))

    def failure(self, epoch: int | None = None) -> FailureRecord | None:
        """The failure that was posted for the epoch, asked of the store now."""
        key = failure_key(self.epoch if epoch is None else epoch)
        return FailureRecord.decode(self.store.get(key, self.timeout)) if self.store.check(key) else None

    @abstractmethod
    def close(self) -> None:
        """Leave: ranks that wait for this one in a later step raise PeerFailed instead."""

    # -- meetings: every rank calls them, in the same order

    def gather(self, name: str, payload: bytes, *, timeout: float | None = None) -> list[bytes]:
        """Every rank's payload, on every rank. Small things: a timeline, a list of losses."""
        self.meetings += 1
        folder, before = meeting_folder(self.meetings), meeting_folder(self.meetings - 1)
        self.store.set(f"{folder}/{self.rank}", payload)
        self.store.first(f"{folder}/called", json.dumps([self.rank, self.epoch, name]).encode())
        payloads = self.store.get_all(folder, self.timeout if timeout is None else timeout, posts=name)
        # All have posted here, so all have left the meeting before: nobody reads its posts any more.
        self.store.delete(f"{before}/{self.rank}")
        if self.rank == 0:
            self.store.delete(f"{before}/called")
        return payloads

    def agree(self, name: str, facts: Mapping[str, str], *, timeout: float | None = None) -> None:
        """Compare the facts with those of all ranks; every rank raises RanksDisagree if one differs.

        Ranks that are at different meetings (one trains, one evaluates) disagree on the name.
        """
        mine = {"about to": name, **facts}
        posts = self.gather(f"facts for {name!r}", json.dumps(mine).encode(), timeout=timeout)
        everyone = [json.loads(post) for post in posts]
        if any(facts != everyone[0] for facts in everyone):
            raise RanksDisagree(_differences(everyone))

    def sum(self, tensor: Tensor) -> None:
        """Make the small tensor, on every rank, the sum over all ranks: up a tree to rank 0, and down again."""
        parent, children = self.family()
        # Receives first: a message that is awaited goes out at once, one that is not costs a question and an answer.
        total = torch.empty_like(tensor)
        answer = [] if parent is None else [self.irecv(total, parent)]
        parts = [torch.empty_like(tensor) for _ in children]
        for work in [self.irecv(part, child) for part, child in zip(parts, children, strict=True)]:
            work.wait()
        for part in parts:
            tensor += part
        if parent is not None:
            self.isend(tensor, parent).wait()
            answer[0].wait()
            tensor.copy_(total)
        for work in [self.isend(tensor, child) for child in children]:
            work.wait()

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Give every rank the source's small tensor, down a tree."""
        parent, children = self.family(source)
        if parent is not None:
            self.irecv(tensor, parent).wait()
        for work in [self.isend(tensor, child) for child in children]:
            work.wait()

    def family(self, root: int = 0) -> tuple[int | None, list[int]]:
        """This rank's parent and children in a tree of all ranks; the root has no parent."""
        size = self.num_ranks
        place = (self.rank - root) % size
        children = [(child + root) % size for child in (2 * place + 1, 2 * place + 2) if child < size]
        return (None if place == 0 else ((place - 1) // 2 + root) % size), children

    def clock_offset(self, *, rounds: int = 8) -> float:
        """Seconds to add to this rank's ``time.perf_counter()`` to get that of rank 0.

        Each rank in turn asks rank 0 for the time; the quickest of ``rounds`` answers counts.
        """
        reading = torch.zeros(1, dtype=torch.float64, device=self.device)
        if self.rank == 0:
            for peer in range(1, self.num_ranks):
                for _ in range(rounds):
                    self.irecv(reading, peer).wait()
                    reading.fill_(time.perf_counter())
                    self.isend(reading, peer).wait()
            return 0.0
        answers = []
        for _ in range(rounds):
            asked = time.perf_counter()
            self.isend(reading, 0).wait()
            self.irecv(reading, 0).wait()
            answered = time.perf_counter()
            answers.append((answered - asked, reading.item() - (asked + answered) / 2))
        return min(answers)[1]


class _CheckedWork:
    """A message whose wait explains its errors."""

    __slots__ = ("_peer", "_transport", "_what", "_work")

    def __init__(self, transport: Transport, work: Work | None, peer: int, *, what: str) -> None:
        self._transport, self._work, self._peer, self._what = transport, work, peer, what

    def wait(self, timeout: timedelta | None = None, /) -> None:
        if self._work is None:
            return
        try:
            self._transport.waiter()(self._work) if timeout is None else self._work.wait(timeout)
        except RuntimeError as error:
            raise self._transport.explain(error, peer=self._peer, what=self._what) from error


def failure_key(epoch: int) -> str:
    return f"failure/{epoch}"


def meeting_folder(meeting: int) -> str:
    """Where the ranks post for a meeting; under "called" stands who came first, after how many steps, and what for."""
    return f"meeting/{meeting}"


def _kind_of(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


def _differences(everyone: Sequence[Mapping[str, str]]) -> str:
    """A table: a row for each set of ranks that agree, a column for each fact that differs."""
    names = list(dict.fromkeys(name for facts in everyone for name in facts))
    names = [name for name in names if len({facts.get(name) for facts in everyone}) > 1]
    rows: dict[tuple[str, ...], list[int]] = {}
    for rank, facts in enumerate(everyone):
        rows.setdefault(tuple(facts.get(name, "-") for name in names), []).append(rank)
    table = [("rank", *names), *((", ".join(map(str, ranks)), *values) for values, ranks in rows.items())]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table)
    return "the ranks are about to run different things:\n  " + "\n  ".join(lines) + "\nGive every rank the same."
