"""Transport: messages between ranks, collectives, and reports of failures.

transport.connect([1, 2])          # all ranks, after the same meeting
transport.begin_step()
...                                # messages of the step; transport.failed tells of other ranks' failures
transport.end_step(fine=True)
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from penstock.comm.collectives import Collectives, Edge, Tree
from penstock.comm.device_wait import wait_for_device
from penstock.comm.messages import Messages
from penstock.errors import RunError
from penstock.health.failure import NOBODY, FailureRecord
from penstock.health.position import Whereabouts, table
from penstock.plan.check_communicators import QueueLayout


class Store(Protocol):
    """Small values that every rank of the transport can see. No wait is without a bound.

    transport.store.set("ready/0", b"1")
    transport.store.get("ready/0", timeout=10)
    """

    def set(self, key: str, value: bytes) -> None: ...

    def first(self, key: str, value: bytes) -> bytes:
        """Set the key unless it is there already; whatever it holds now comes back."""
        ...

    def get(self, key: str, timeout: float) -> bytes:
        """Wait for the key. StepTimeout names it when it never comes."""
        ...

    def check(self, key: str) -> bool: ...

    def add(self, key: str, number: int) -> int: ...

    def delete(self, key: str) -> None: ...


_CLOCK_ROUNDS = 8


class Looked(Protocol):
    """What knows where this rank is; see `penstock.run.lookout`."""

    def look(self, awaited: int | None) -> Whereabouts: ...


class Transport(Messages):
    """One rank's end of all that the ranks tell one another.

        transport.isend(tensor, peer=1).wait()

    ``failed``   during a step: the failure that some other rank posted, or None. A plain attribute, cheap to read.
    ``epoch``    the number of the current or last step, the same on every rank. A failure belongs to an epoch.
    ``meetings`` the number of the current or last collective, likewise; ``in_collective`` its name, while it is on.
    """

    store: Store
    failed: FailureRecord | None = None
    epoch: int = 0
    meetings: int = 0
    in_collective: str | None = None
    store_holder: int = NOBODY  # the rank whose process holds the store, if it is one of these and is known
    position: Looked | None = None  # where this rank is in its step, once there was one
    queues: QueueLayout = "direction"  # which messages of a step wait for one another
    _busy = False  # whether the thread that is in a call is where only the ranks together may go on

    def __init__(self) -> None:
        self._calls = threading.RLock()  # held by the thread that is in a call

    # -- messages

    @property
    def control(self) -> Messages:
        """Messages in host memory, for what ranks tell one another about a step. Where the messages of the step are in
        host memory too, they are the same ones."""
        return self

    def arrange(self, queues: QueueLayout) -> None:
        """Before the first message: let messages share queues. What needs no sharing has a queue for each direction."""

    def connect(self, peers: Collection[int]) -> None:
        """Get the ways to these peers ready. All ranks call it after the same meeting, each with those that call it with
        this one, and before the first message that must be quick."""

    # -- steps and failures

    @contextmanager
    def called(self, what: str) -> Iterator[None]:
        """Around a public call that changes or reads what is trained, before it does: other threads and hooks are refused."""
        held = self._calls.acquire(blocking=False)
        try:
            if not held or self._busy:
                raise RunError(
                    f"rank {self.rank}: {what} while another thread of this process, or a hook in a step, is in one; the "
                    "ranks of a pipeline do one thing after another. Nothing was changed. Call it from one thread, or hold a "
                    "lock of your own around it"
                )
            yield
        finally:
            if held:
                self._calls.release()

    @contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Around what the ranks do together, in a call or as one: two threads of one process cannot do so at once."""
        with self.called(what):
            self._busy = True
            try:
                yield
            finally:
                self._busy = False

    def begin_step(self) -> int:
        """Begin the next epoch: from here on ``failed`` tells of other ranks' failures in it."""
        self.epoch += 1
        self.failed = None
        return self.epoch

    @abstractmethod
    def end_step(self, *, fine: bool = True) -> None:
        """End the epoch, however the step ended; ``fine`` says whether it went well, which all ranks say alike."""

    @abstractmethod
    def report_failure(self, record: FailureRecord) -> FailureRecord:
        """Tell all ranks of a failure in this epoch. The first one that is known stands, and comes back."""

    @abstractmethod
    def failure(self) -> FailureRecord | None:
        """The failure of this epoch that is known by now."""

    @property
    def unusable(self) -> str | None:
        """Why no more steps can be made, if that is so."""
        return None

    def give_up(self, cause: str) -> None:
        """This rank will not come to what the others wait for: tell them, and end their waits where that can be done."""

    def lost(self) -> FailureRecord | None:
        """A rank that is known to be gone for good; may be asked in any thread, also between steps."""
        return None

    # -- where everybody is

    def where(self) -> Whereabouts:
        """Where this rank is now; may be asked in any thread."""
        if self.position is None:
            return Whereabouts(self.rank, self.epoch, doing="has made no step yet")
        return self.position.look(self.awaited)

    def everybody(self) -> str:
        """A table of where all ranks are, as far as they answer soon; for errors."""
        return table([self.where()], num_ranks=self.num_ranks)

    @abstractmethod
    def close(self) -> None:
        """Leave: ranks that wait for this one in a later step raise PeerFailed instead."""

    # -- collectives: every rank calls them, in the same order

    def side_messages(self) -> Messages:
        """Messages in host memory that never meet those of a step, whatever other ranks are in the middle of."""
        raise NotImplementedError

    @cached_property
    def collectives(self) -> Collectives:
        """What all ranks of this transport do together."""
        messages, (parent, children) = self.side_messages(), self.family()
        tree = Tree(
            None if parent is None else Edge(messages, parent), tuple(Edge(messages, child) for child in children)
        )
        return Collectives(tree, _InCall(self), number=self.rank, count=self.num_ranks)

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Around one collective: failures of other ranks end its waits."""
        self.meetings += 1
        self.awaited, self.in_collective = None, name
        try:
            self._begin_collective()
            yield
        finally:
            self._end_collective()
            self.awaited = self.in_collective = None

    def _begin_collective(self) -> None:
        """Watch over the other ranks from here on."""

    def _end_collective(self) -> None: ...

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Give every rank the source's small tensor, down a tree."""
        parent, children = self.family(source)
        small = self._on_host(tensor)
        if parent is not None:
            self.control.irecv(small, parent).wait()
        for work in [self.control.isend(small, child) for child in children]:
            work.wait()
        if small is not tensor:
            tensor.copy_(small)

    def _on_host(self, tensor: Tensor) -> Tensor:
        if not tensor.is_cpu:  # with a bound, which the copy does not have
            self.wait_for_device()
        return tensor.cpu()

    def read(self, tensor: Tensor) -> list[float]:
        """The numbers of a small tensor. Where it is on a device, the host waits for it, and no longer than `timeout`."""
        found: list[float] = tensor.tolist()
        return found

    def wait_for_device(self, action: str | None = None) -> None:
        """Until this rank's device has done what it was told; no longer than `timeout`. `action`: the last thing it was told,
        if it had done everything before that."""
        wait_for_device(self.device, self.timeout, everybody=self.everybody)

    def family(self, root: int = 0) -> tuple[int | None, list[int]]:
        """This rank's parent and children in a tree of all ranks; the root has no parent."""
        size = self.num_ranks
        place = (self.rank - root) % size
        children = [(child + root) % size for child in (2 * place + 1, 2 * place + 2) if child < size]
        return (None if place == 0 else ((place - 1) // 2 + root) % size), children

    def clock_offset(self) -> float:
        """Seconds to add to this rank's ``time.perf_counter()`` to get that of rank 0.

        Each rank in turn asks rank 0 for the time, several times; the quickest answer counts.
        """
        reading, control = torch.zeros(1, dtype=torch.float64), self.control
        if self.rank == 0:
            for peer in range(1, self.num_ranks):
                for _ in range(_CLOCK_ROUNDS):
                    control.irecv(reading, peer).wait()
                    reading.fill_(time.perf_counter())
                    control.isend(reading, peer).wait()
            return 0.0
        answers = []
        for _ in range(_CLOCK_ROUNDS):
            asked = time.perf_counter()
            control.isend(reading, 0).wait()
            control.irecv(reading, 0).wait()
            answered = time.perf_counter()
            answers.append((answered - asked, reading.item() - (asked + answered) / 2))
        return min(answers)[1]


class _InCall:
    """Of collectives in the middle of a call that has kept other threads out."""

    def __init__(self, transport: Transport) -> None:
        self.collective = transport.collective

    def called(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()
