"""Channel: this rank's end of the messages to and from one other rank, in the order of the plan."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from inspect import GEN_CLOSED, getgeneratorstate
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from penstock.comm.line import LIMIT, Line
from penstock.comm.transport import Transport, Work
from penstock.run.layout import DATA, HEADER_NUMBERS, POISON

Wait = Callable[[Work], object]
Receiving: TypeAlias = Generator[Work, None, None]
"""A message of a cold step being received: it hands out what to wait for. If Ctrl-C breaks in, it can go on later."""
Buffer = TypeVar("Buffer", Tensor, Tensor | None)


class Poisoned(Exception):
    """A cold message announced that its sender has failed."""


class Channel:
    """Sends are posted and reaped later; receives of a cold step are queued and pulled when somebody needs them."""

    def __init__(self, transport: Transport, peer: int, wait: Wait, *, reap_after: int | None) -> None:
        self.peer = peer
        self.send = transport.sender(peer)
        self.recv = self._recv = transport.receiver(peer)
        self.post = self.post_on_backend
        self.wait = wait
        self.transport = transport
        self.line: Line | None = None  # the way of small messages in this step
        self.device = transport.device
        self.sent: deque[Work] = deque()  # sends on their way
        self.incoming: deque[Receiving] = deque()  # receives of a cold step that are not done yet
        self.reap_after = reap_after  # how many sends of a warm step may be on their way; None: any number
        self.described: deque[int] = deque()  # how many sends each message of a cold step is, for those in `sent`
        self.reaped = 0  # messages of this cold step that were waited for
        self.lost = False  # the connection is gone: nothing more is sent or received, so that the rest can be drained

    def begin(self, *, cold: bool) -> None:
        """Choose the way that the messages of a step go. Both ends know whether it is cold, so they choose alike."""
        line = self.line = None if cold else self.transport.line(self.peer)
        if line is None:
            self.post, self.recv = self.post_on_backend, self._recv
        else:
            self.post, self.recv = partial(self.post_on_line, line), partial(self.expect_on_line, line)

    def post_on_line(self, line: Line, tensor: Tensor) -> None:
        line.send(tensor) if tensor.nbytes <= LIMIT else self.post_on_backend(tensor)

    def expect_on_line(self, line: Line, buffers: list[Tensor]) -> Work:
        buffer = buffers[0]
        return line.expect(buffer) if buffer.nbytes <= LIMIT else self._recv(buffers)

    def post_on_backend(self, tensor: Tensor) -> None:
        """Send a tensor; wait for an older send if many are on their way."""
        sent = self.sent
        if self.reap_after is not None and len(sent) >= self.reap_after:
            self.wait(sent.popleft())
        sent.append(self.send([tensor]))

    def post_described(self, description: bytes, tensors: list[Tensor]) -> None:
        """Send a message of a cold step."""
        blob = torch.frombuffer(bytearray(description), dtype=torch.uint8).to(self.device)
        works = [self.send([part]) for part in (self.numbers(DATA, blob.numel()), blob, *tensors)]
        self.sent.extend(works)
        self.described.append(len(works))

    def post_poison(self) -> None:
        """Send, in place of a message of a cold step, that none will come."""
        self.sent.append(self.send([self.numbers(POISON, 0)]))
        self.described.append(1)

    def reap(self, count: int) -> None:
        """Wait for the first `count` messages of a cold step, which have arrived."""
        while self.reaped < count:
            for _ in range(self.described.popleft()):
                self.wait(self.sent.popleft())
            self.reaped += 1

    def receive_description(self) -> Generator[Work, None, bytes]:
        """Receive the description of a message of a cold step; its tensors follow."""
        header = self.numbers(0, 0)
        yield self.recv([header])
        kind, length = header.tolist()
        if kind == POISON:
            raise Poisoned
        blob = torch.empty(length, dtype=torch.uint8, device=self.device)
        yield self.recv([blob])
        return bytes(blob.tolist())

    def receive(self, buffers: list[Buffer]) -> Generator[Work, None, list[Buffer]]:
        """Receive into the buffers, one after another; None stands for no message."""
        for buffer in buffers:
            if buffer is not None:
                yield self.recv([buffer])
        return buffers

    def numbers(self, *values: int) -> Tensor:
        assert len(values) == HEADER_NUMBERS, "a header has a fixed size"
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def pull(self) -> None:
        """Do the queued receive whose turn it is, or the rest of it."""
        receiving = self.incoming[0]
        try:
            for work in receiving:
                self.wait(work)
        finally:
            if getgeneratorstate(receiving) == GEN_CLOSED:
                self.incoming.popleft()

    def pull_until(self, done: Callable[[], bool]) -> None:
        """Do queued receives, in their order, until `done`."""
        while not done():
            self.pull()

    def flush(self) -> None:
        """Wait for all sends."""
        while self.sent:
            self.wait(self.sent.popleft())

    def settle(self) -> None:
        """After Ctrl-C broke off a wait: take what was waited for all the same."""
        if self.line is not None:
            self.line.settle()

    def clear(self) -> None:
        self.sent.clear()
        self.described.clear()
        self.reaped = 0
        self.incoming.clear()
