"""Channel: this rank's end of the messages to and from one other rank, in the order of the plan."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from inspect import GEN_CLOSED, getgeneratorstate
from typing import NoReturn, TypeVar

from torch import Tensor

from penstock.comm.framing import Receiving, frame, receive_frame
from penstock.comm.messages import Work
from penstock.comm.transport import Transport
from penstock.errors import PenstockError
from penstock.run.layout import DATA, POISON
from penstock.stage.held import is_out_of_memory

Wait = Callable[[Work], object]
Buffer = TypeVar("Buffer", Tensor, Tensor | None)


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
        self.transport = transport
        self.device = transport.device
        self.sent: deque[Work] = deque()  # sends on their way
        self.incoming: deque[Receiving[None]] = deque()  # receives of a cold step that are not done yet
        self.reap_after = reap_after  # how many sends of a warm step may be on their way; None: any number
        self.described: deque[int] = deque()  # how many sends each message of a cold step is, for those in `sent`
        self.reaped = 0  # messages of this cold step that were waited for
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

    def post_described(self, description: bytes, tensors: list[Tensor]) -> None:
        """Send a message of a cold step."""
        self._post_all(frame(DATA, description), tensors)

    def post_poison(self) -> None:
        """Send, in place of a message of a cold step, that none will come."""
        self._post_all(frame(POISON, b""), [])

    def _post_all(self, description: list[Tensor], tensors: list[Tensor]) -> None:
        try:
            works = [work for part in description if (work := self.tell([part])) is not None]
            works += [work for tensor in tensors if (work := self.send([tensor])) is not None]
        except RuntimeError as error:
            self.fail(error)
        self.sent.extend(works)
        self.described.append(len(works))

    def reap(self, count: int) -> None:
        """Wait for the first `count` messages of a cold step, which have arrived."""
        while self.reaped < count:
            self.wait_for_sent(self.described.popleft())
            self.reaped += 1

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
        kind, description = yield from receive_frame(self.hear)
        if kind == POISON:
            raise Poisoned
        return description

    def receive(self, buffers: list[Buffer]) -> Receiving[list[Buffer]]:
        """Receive into the buffers, one after another; None stands for no message."""
        for buffer in buffers:
            if buffer is not None:
                yield self.recv([buffer])
        return buffers

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

    def pull_until(self, done: Callable[[], bool]) -> None:
        """Do queued receives, in their order, until `done`."""
        while not done():
            self.pull()

    def flush(self) -> None:
        """Wait for all sends."""
        self.wait_for_sent(len(self.sent))

    def clear(self) -> None:
        self.sent.clear()
        self.described.clear()
        self.reaped = 0
        self.incoming.clear()
        self.lost = self.drains = False
