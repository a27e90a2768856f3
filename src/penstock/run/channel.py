"""Channel: this rank's end of the messages to and from one other rank, in the order of the plan.

In a cold step a receive happens when its value is needed, so a send may be under way for long. But each message says how many of
the other end's messages have arrived by then. To wait for those sends cannot block, and frees their memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from inspect import GEN_CLOSED, getgeneratorstate
from typing import NoReturn

from torch import Tensor

from penstock.comm.framing import Receiving, frame, receive_frame
from penstock.comm.messages import Work
from penstock.comm.transport import Transport
from penstock.errors import PenstockError
from penstock.stage.held import is_out_of_memory

Wait = Callable[[Work], object]
_POISON = -1  # what a frame announces in place of a number of messages: its sender has failed, and none will come


class Poisoned(Exception):
    """A cold message announced that its sender has failed."""


class Channel:
    """Sends are posted and reaped later; receives of a cold step are queued and pulled when somebody needs them."""

    def __init__(self, transport: Transport, peer: int, wait: Wait, *, reap_after: int | None) -> None:
        self.peer = peer
        self.send = transport.sender(peer)
        self.recv = transport.receiver(peer)
        self.tell = transport.control.sender(peer)  # what a message of a cold step looks like
        self.hear = transport.control.receiver(peer)
        self.wait = wait
        self.in_turn = transport.queues != "direction"  # messages share a queue: each is received in its place
        self.transport = transport
        self.device = transport.device
        self.sent: deque[Work] = deque()  # sends on their way
        self.incoming: deque[Receiving[None]] = deque()  # receives of a cold step that are not done yet
        self.reap_after = reap_after  # how many sends of a warm step may be on their way; None: any number
        self.described: deque[int] = deque()  # how many sends each message of a cold step is, for those in `sent`
        self.reaped = 0  # messages of this cold step that were waited for
        self.received = 0  # messages that have arrived here in this cold step
        self.used = 0  # messages of this end that have arrived at the other, as far as that has told
        self.lost = False  # the connection is gone: nothing more is sent or received, so that the rest can be drained
        self.drains = False  # the step has failed: what goes wrong now needs no explanation

    def fail(self, error: RuntimeError) -> NoReturn:
        """Raise what an error of a message means: the backend words it in its own way, and does not name the rank.

        Whoever posts or awaits a message of a step calls this when that raises.
        """
        if self.drains or isinstance(error, PenstockError) or is_out_of_memory(error):
            raise error
        self.lost = True
        raise self.transport.explain(error, peer=self.peer, what="a message of the step") from error

    def post(self, tensor: Tensor) -> None:
        """Send a tensor; wait for an older send if many are on their way."""
        sent = self.sent
        try:
            if self.reap_after is not None and len(sent) >= self.reap_after:
                self.transport.awaited = self.peer
                self.wait(sent.popleft())
            work = self.send([tensor])
        except RuntimeError as error:
            self.fail(error)
        if work is not None:
            sent.append(work)

    def post_described(self, description: bytes | None, tensors: Sequence[Tensor] = ()) -> None:
        """Send a message of a cold step; None: say in its place that none will come."""
        parts = frame(_POISON, b"") if description is None else frame(self.received, description)
        try:
            works = [work for part in parts if (work := self.tell([part])) is not None]
            works += [work for tensor in tensors if (work := self.send([tensor])) is not None]
        except RuntimeError as error:
            self.fail(error)
        self.sent.extend(works)
        self.described.append(len(works))

    def wait_for_sent(self, count: int) -> None:
        """Wait for the oldest sends that are on their way."""
        self.transport.awaited = self.peer
        try:
            for _ in range(count):
                self.wait(self.sent.popleft())
        except RuntimeError as error:
            self.fail(error)

    def receive_description(self) -> Receiving[bytes]:
        """Receive the description of a message of a cold step; its tensors follow."""
        used, description = yield from receive_frame(self.hear)
        if used == _POISON:
            raise Poisoned
        self.used = used
        return description

    def queue(self, receiving: Receiving[None]) -> None:
        """Put a receive of a cold step behind the others. Its turn comes when somebody needs it, or something behind it."""
        self.incoming.append(receiving)
        while self.in_turn and not self.drains and self.incoming:
            self.pull()

    def pull(self) -> None:
        """Do the queued receive whose turn it is, or the rest of it."""
        receiving = self.incoming[0]
        self.transport.awaited = self.peer
        try:
            for work in receiving:
                self.wait(work)
        except RuntimeError as error:
            self.fail(error)
        finally:
            if getgeneratorstate(receiving) == GEN_CLOSED:
                self.incoming.popleft()
                self.received += 1
        while self.reaped < self.used and self.described:
            self.reaped += 1
            self.wait_for_sent(self.described.popleft())

    def flush(self) -> None:
        """Wait for all sends."""
        self.wait_for_sent(len(self.sent))
        self.reaped += len(self.described)
        self.described.clear()

    def clear(self) -> None:
        self.sent.clear()
        self.described.clear()
        self.reaped = self.received = self.used = 0
        self.incoming.clear()
        self.lost = self.drains = False
