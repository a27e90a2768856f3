"""Ranks as threads of one process: for tests, and to try a pipeline without starting processes.

>>> def hello(transport):
...     right, left = (transport.rank + 1) % transport.num_ranks, (transport.rank - 1) % transport.num_ranks
...     received = torch.empty(1)
...     works = [transport.irecv(received, left), transport.isend(torch.tensor([float(transport.rank)]), right)]
...     for work in works:
...         work.wait()
...     return received.item()
>>> LocalWorld(3).run(hello)
[2.0, 0.0, 1.0]
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from operator import methodcaller
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from penstock.checks import check_types
from penstock.comm.baton import Baton, Waiting
from penstock.comm.messages import Messages, Receive, Send, Work, kind_of
from penstock.comm.transport import Store, Transport
from penstock.errors import PenstockError, RunError, ShapeError, StepTimeout, TransportError
from penstock.health.failure import FailureRecord
from penstock.health.position import table

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

MessageHook = Callable[[int, int, int], bool | None]
"""Asked at each send with (source, destination, number of the message in that direction, from 0).

What it raises is raised by the send. True holds the message back for as long as any rank can go on without it.
"""


class LocalWork:
    """A send or a receive between two threads."""

    __slots__ = ("_channel", "_error", "_peer", "_transport", "done", "what")

    def __init__(self, transport: LocalTransport, channel: _LocalChannel, peer: int, what: str) -> None:
        self._transport, self._channel, self._peer, self.what = transport, channel, peer, what
        self._error: PenstockError | None = None
        self.done = False

    def finish(self, error: PenstockError | None = None) -> None:
        self._error, self.done = error, True

    def wait(self, timeout: timedelta = timedelta(0), /) -> None:
        """Let the other ranks run until this is done. It never takes real time that nobody uses."""
        if not self.done:
            try:
                self._transport.wait_until(lambda: self.done, peer=self._peer, what=self.what)
            except PenstockError:
                self._channel.withdraw(self)
                raise
        if self._error is not None:
            raise self._error


class _LocalChannel:
    """The messages from one rank to another: sends and receives that have not met."""

    __slots__ = ("held", "receives", "receives_posted", "sends", "sends_posted")

    def __init__(self) -> None:
        self.sends: deque[tuple[Tensor, LocalWork]] = deque()
        self.receives: deque[tuple[Tensor, LocalWork]] = deque()
        self.sends_posted = self.receives_posted = 0
        self.held: set[LocalWork] = set()

    def withdraw(self, work: LocalWork) -> None:
        """Forget a message that will never arrive, so that nothing later can meet it."""
        for queue in (self.sends, self.receives):
            kept = [posted for posted in queue if posted[1] is not work]
            queue.clear()
            queue.extend(kept)

    def match(self) -> None:
        while self.sends and self.receives and self.sends[0][1] not in self.held:
            (tensor, send), (buffer, receive) = self.sends.popleft(), self.receives.popleft()
            wrong = ""
            if tensor.shape == buffer.shape and tensor.dtype == buffer.dtype:
                buffer.data.copy_(tensor.data)  # written as a network card would: no autograd, no version count
            else:
                wrong = f"sent {kind_of(tensor)}, awaited {kind_of(buffer)}: {receive.what}, {send.what}"
            for work in (send, receive):
                work.finish(ShapeError(wrong) if wrong else None)


class LocalStore:
    """The world's dictionary, seen from one rank."""

    def __init__(self, transport: LocalTransport, values: dict[str, bytes]) -> None:
        self._transport, self._values = transport, values

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def first(self, key: str, value: bytes) -> bytes:
        return self._values.setdefault(key, value)

    def get(self, key: str, timeout: float) -> bytes:
        self._transport.wait_until(partial(self.check, key), peer=None, what=f"{key!r} in the store")
        return self._values[key]

    def check(self, key: str) -> bool:
        return key in self._values

    def add(self, key: str, number: int) -> int:
        total = int(self._values.get(key, b"0")) + number
        self._values[key] = str(total).encode()
        return total

    def delete(self, key: str) -> None:
        self._values.pop(key, None)


class LocalTransport(Transport):
    """One thread's end. ``world.run`` hands it to the function of each rank.

    penstock.LocalWorld(2).run(lambda transport: transport.rank)  # [0, 1]
    """

    def __init__(self, world: LocalWorld, rank: int) -> None:
        check_types("LocalTransport", TransportError, world=(world, LocalWorld), rank=(rank, int))
        super().__init__()
        self._world = world
        self._watching = False
        self.rank = rank
        self.num_ranks = world.num_ranks
        self.timeout = 1800.0
        self.device = torch.device("cpu")
        self.store: Store = LocalStore(self, world.values)

    def sender(self, peer: int) -> Send:
        return partial(self._world.post_send, self, self.peer(peer))

    def receiver(self, peer: int) -> Receive:
        return partial(self._world.post_receive, self, self.peer(peer))

    def waiter(self) -> Callable[[Work], object]:
        return methodcaller("wait")

    def explain(self, error: Exception, *, peer: int, what: str) -> PenstockError:
        if isinstance(error, PenstockError):
            return error
        return TransportError(f"rank {self.rank}, {what} to or from rank {peer}: {type(error).__name__}: {error}")

    def side_messages(self) -> Messages:
        return _SideMessages(self, self._world.side_channels)

    def wait_until(self, ready: Callable[[], bool], *, peer: int | None, what: str) -> None:
        try:
            self._world.baton.wait(self.rank, Waiting(ready, peer, what))
        except StepTimeout as late:
            everyone = [transport.where() for transport in self._world.transports]
            raise StepTimeout(f"{late}\n{table(everyone, num_ranks=self.num_ranks)}") from late

    def begin_step(self) -> int:
        super().begin_step()
        self._world.failures.pop(self.epoch - 2, None)  # all ranks are through with that step
        self._watching = True
        self.failed = self.failure()
        return self.epoch

    def end_step(self, *, fine: bool = True) -> None:
        self._watching = False

    def failure(self) -> FailureRecord | None:
        return self._world.failures.get(self.epoch)

    def report_failure(self, record: FailureRecord) -> FailureRecord:
        posted = self._world.failures.setdefault(self.epoch, record)
        self._world.failures.pop(self.epoch - 2, None)  # which no rank can ask for any more
        for other in self._world.transports:
            if other._watching and other.epoch == self.epoch and other.rank != posted.rank:
                other.failed = posted
        return posted

    def close(self) -> None:
        """Nothing to let go of: a rank leaves when its function returns."""


class _SideMessages(Messages):
    """Messages of collectives: no hook is asked for them, and a send is done only when it is received."""

    def __init__(self, transport: LocalTransport, channels: defaultdict[tuple[int, int], _LocalChannel]) -> None:
        self.rank, self.num_ranks = transport.rank, transport.num_ranks
        self.device, self.timeout = transport.device, transport.timeout
        self._transport, self._channels = transport, channels

    def sender(self, peer: int) -> Send:
        channel = self._channels[self.rank, self.peer(peer)]
        return partial(self._post, channel, channel.sends, peer)

    def receiver(self, peer: int) -> Receive:
        channel = self._channels[self.peer(peer), self.rank]
        return partial(self._post, channel, channel.receives, peer)

    def _post(
        self, channel: _LocalChannel, queue: deque[tuple[Tensor, LocalWork]], peer: int, tensors: list[Tensor]
    ) -> LocalWork:
        work = LocalWork(self._transport, channel, peer, f"rank {peer} at {self._transport.in_collective!r}")
        queue.append((tensors[0], work))
        channel.match()
        return work

    def waiter(self) -> Callable[[Work], object]:
        return self._transport.waiter()

    def explain(self, error: Exception, *, peer: int, what: str) -> PenstockError:
        return self._transport.explain(error, peer=peer, what=what)


class LocalWorld:
    """``num_ranks`` ranks as threads of this process, of which one runs at a time.

        losses = penstock.LocalWorld(2).run(train)  # train(transport), on each rank

    ``rendezvous``  a send is done only when its receive is posted; else it is done at once, with a copy taken.
    ``seed``        who runs next is drawn instead of going round: other orders, each of them repeatable.
    ``on_message``  a hook for tests; see ``MessageHook``.

    The store, the epochs and the transports last as long as the world, so ``run`` can be called again and again.
    After ``run``, ``errors`` holds what each rank raised.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        rendezvous: bool = False,
        seed: int | None = None,
        on_message: MessageHook | None = None,
    ) -> None:
        if num_ranks < 1:
            raise ValueError(f"a world has at least 1 rank, not {num_ranks}")
        self.num_ranks = num_ranks
        self.rendezvous = rendezvous
        self.seed = seed
        self.on_message = on_message
        self.values: dict[str, bytes] = {}
        self.failures: dict[int, FailureRecord] = {}  # by epoch
        self.transports = [LocalTransport(self, rank) for rank in range(num_ranks)]
        self.errors: list[BaseException | None] = [None] * num_ranks
        self.baton = Baton(num_ranks, self._let_go, seed=seed)
        self._channels: defaultdict[tuple[int, int], _LocalChannel] = defaultdict(_LocalChannel)
        self.side_channels: defaultdict[tuple[int, int], _LocalChannel] = defaultdict(_LocalChannel)

    def run(
        self,
        function: Callable[Concatenate[LocalTransport, Arguments], Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> list[Result]:
        """Call ``function(transport, ...)`` on every rank, and return what each returned.

        The first exception that a rank raised comes out as it is, with a note that names the rank.
        """
        self._level()
        self.baton = Baton(self.num_ranks, self._let_go, seed=self.seed)
        results, raised = self.baton.run(lambda rank: function(self.transports[rank], *args, **kwargs))
        self.errors = [raised.get(rank) for rank in range(self.num_ranks)]
        left_over = self._left_over()
        self._channels.clear()
        for rank, error in raised.items():
            error.add_note(f"raised on rank {rank} of {self.num_ranks} (ranks as threads)")
            raise error
        if left_over:
            raise RunError("messages without their other half: " + "; ".join(left_over))
        return results

    def post_send(self, transport: LocalTransport, peer: int, tensors: list[Tensor], /) -> LocalWork:
        tensor, channel = _only(tensors), self._channels[transport.rank, peer]
        number = channel.sends_posted
        hold = self.on_message is not None and self.on_message(transport.rank, peer, number)
        channel.sends_posted += 1
        work = LocalWork(transport, channel, peer, f"rank {peer} to receive message {number}")
        if hold:
            channel.held.add(work)
        if not self.rendezvous and (hold or not channel.receives):
            tensor = tensor.detach().clone()
            work.finish()
        channel.sends.append((tensor, work))
        channel.match()
        return work

    def post_receive(self, transport: LocalTransport, peer: int, tensors: list[Tensor], /) -> LocalWork:
        buffer, channel = _only(tensors), self._channels[peer, transport.rank]
        work = LocalWork(transport, channel, peer, f"message {channel.receives_posted} from rank {peer}")
        channel.receives_posted += 1
        channel.receives.append((buffer, work))
        channel.match()
        return work

    def _level(self) -> None:
        """Give all ranks the same counts again, if a run that failed kept some of them from a step or a meeting."""
        epoch = max(transport.epoch for transport in self.transports)
        meetings = max(transport.meetings for transport in self.transports)
        for transport in self.transports:
            transport.epoch, transport.meetings = epoch, meetings

    def _let_go(self) -> bool:
        """Let the messages that were held back arrive, because nobody can go on without them."""
        held = [channel for channel in self._channels.values() if channel.held]
        for channel in held:
            channel.held.clear()
            channel.match()
        return bool(held)

    def _left_over(self) -> list[str]:
        return [
            f"{len(posted)} {kind} from rank {source} to rank {destination}"
            for (source, destination), channel in sorted(self._channels.items())
            for kind, posted in (("sent", channel.sends), ("awaited", channel.receives))
            if posted
        ]


def _only(tensors: list[Tensor]) -> Tensor:
    (tensor,) = tensors
    if not tensor.is_contiguous():
        strides = f"{kind_of(tensor)} with strides {list(tensor.stride())}"
        raise ShapeError(f"messages are contiguous; this one is {strides}, write tensor.contiguous()")
    return tensor
