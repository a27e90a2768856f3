"""Messages between accelerators: data over communicators whose order is proved, everything else over host memory.

Communicators such as NCCL's run what they are given one after another, on a stream of their own, and the first message makes
them, which blocks the host until the other rank joins. So each pair of ranks has two of its own, one for each direction; all
of them are made, and used once, before the first step, in an order that is the same on every rank. Then only what the lowered
plan orders is ordered, and the check of the plan (`queues="direction"`) is the proof for what runs.

What ranks tell one another about a step (preamble, verdict, descriptions, flags, clocks) goes over gloo and lines, in host
memory: a warm step never makes the host wait for the device. `wait` makes the current stream wait. A peer that dies
is noticed by its connections in host memory, or by the heartbeat; the communicators are then aborted, so that no stream stays
stuck. If all processes live after all (one was stopped and goes on), the next step begins with new communicators, and a new gloo
for host memory. The user's own process group is only asked for its backend, timeout and options.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from operator import methodcaller
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from penstock.comm.communicators import Communicator, Maker, Posted, all_at_once
from penstock.comm.device_wait import wait_for_device
from penstock.comm.distributed import HOST_TAG, DistributedTransport, Gloo, last_words, place_in_store
from penstock.comm.messages import Messages, Receive, Send, Work
from penstock.errors import DeviceFailed, PeerFailed, PenstockError, RunError, StepTimeout, TransportError
from penstock.health.failure import FailureKind, FailureRecord, split_by_farewell
from penstock.health.rendezvous import heartbeat
from penstock.plan.check_communicators import QueueLayout

_TAG = 0  # communicators have none: NCCL's ignore it
_CARRIED = frozenset(
    (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64)
)
"""The types that every backend knows. Others travel as bytes."""
_FAREWELL = 10.0  # seconds that the device may take, when this rank leaves after a failure, to finish what was sent
_SHUTDOWN = 10.0  # seconds to wait for communicators to end when nothing is on its way
_ABORT = 2.0  # and when something is: a device that is stuck in a group of the user's own goes on without us


class AcceleratorTransport(DistributedTransport):
    """A process group whose tensors are on accelerators. `DistributedTransport.of(group, device="cuda")` makes it."""

    _fine = True  # whether the last step went well
    _aborted = False  # whether the communicators were
    generation = 0  # how often connections were made anew

    def __init__(self, group: dist.ProcessGroup | None = None, *, device: torch.device | str) -> None:
        super().__init__(group, device=_current(torch.device(device)))
        self._maker = Maker(self.backend_name, self.backend, self.bound)
        self._names = dist.get_process_group_ranks(group or dist.group.WORLD)  # of the ranks in the whole job
        self._ways: dict[int, Way] = {}
        self._connected: set[int] = set()
        self._control = Control(self)
        self.whole: Communicator | None = None  # the communicator of all ranks, where there is but one

    def _in_host_memory(self, group: dist.ProcessGroup | None = None) -> Gloo:
        """A gloo of penstock's own, which all ranks make together, and anew after connections were broken."""
        place = PrefixStore(f"control/{self.generation}", self.place)
        return cast("Gloo", dist.ProcessGroupGloo(place, self.rank, self.num_ranks, self.bound))

    def _backend_calls(self, peer: int) -> tuple[Send, Receive]:
        return (  # by whichever gloo is there then: the calls are kept
            lambda tensors: self._gloo.send(tensors, peer, HOST_TAG),
            lambda tensors: self._gloo.recv(tensors, peer, HOST_TAG),
        )

    @property
    def control(self) -> Messages:
        return self._control

    def arrange(self, queues: QueueLayout) -> None:
        if queues == self.queues:
            return
        if self._connected:
            raise RunError(
                f"communicators for queues by {queues!r} were asked for when those by {self.queues!r} were there already; give "
                "every schedule of a process group the same receives=, or another group"
            )
        self.queues = queues

    def connect(self, peers: Collection[int]) -> None:
        super().connect(peers)
        self._connected |= {*peers}
        self._open(peers)

    def _open(self, peers: Collection[int]) -> None:
        if self.queues == "one" and self.whole is None:
            self.whole = self.communicator("whole", range(self.num_ranks))
            if hasattr(self.whole, "eager_connect_single_device"):  # else it may make one for each pair
                self.whole.eager_connect_single_device(self.device)
        # Two ranks that meet in this order meet without a cycle: everybody takes the pairs in the order of the lower rank.
        for peer in sorted(peers, key=lambda peer: (min(peer, self.rank), max(peer, self.rank))):
            self._way(peer).open()

    def communicator(self, name: str, ranks: Sequence[int]) -> Communicator:
        """Of these ranks of the group, in this order."""
        name = f"{self.folder}/communicators/{self.generation}/{name}"
        store, names = place_in_store(name), [self._names[rank] for rank in ranks]
        return self._maker.make(name, store, rank=ranks.index(self.rank), ranks=names)

    def _communicators(self) -> list[Communicator]:
        """All that are there, each once."""
        found: dict[int, Communicator] = {}
        if self.whole is not None:
            found[id(self.whole)] = self.whole
        for way in self._ways.values():
            for each in way.pair or ():
                found[id(each)] = each
        return list(found.values())

    def sender(self, peer: int) -> Send:
        return self._way(peer).send

    def receiver(self, peer: int) -> Receive:
        return self._way(peer).receive

    def isend(self, tensor: Tensor, peer: int) -> Work:
        """The wait makes the current stream wait, so that the tensor may be changed. In a step `end_step` does it for all."""
        super().isend(tensor, peer)
        return self._way(peer)

    def waiter(self) -> Callable[[Work], object]:
        return methodcaller("wait")  # the stream waits; a bound would make the host wait for it

    def read(self, tensor: Tensor) -> list[float]:
        """What is on its way from a peer that fails never comes: then its failure is raised, and no stream stays stuck."""
        self.wait_for_device()
        found: list[float] = []
        with self._device_errors(None):
            found = super().read(tensor)
        if self._torn is not None:  # meanwhile, and what was read may be nothing
            self.wait_for_device()
        return found

    def wait_for_device(self, action: str | None = None) -> None:
        if self._torn is None:
            try:
                with self._device_errors(action):
                    wait_for_device(self.device, self.timeout, look=self._look, everybody=self.everybody)
            except PeerFailed as error:
                self.break_connections(FailureRecord.of(error, self.rank))
        if self._torn is not None:
            raise self._since_torn(self._torn)

    @contextmanager
    def _device_errors(self, action: str | None) -> Iterator[None]:
        """Around a wait for the device: what it says of things that went wrong there is told with rank and step."""
        try:
            yield
        except PenstockError:
            raise
        except RuntimeError as error:
            if self._torn is not None:  # what was under way was aborted, and why is known
                return
            raise DeviceFailed(self.rank, self.epoch, str(error), action=action) from error

    def _look(self) -> None:
        """Raise if a peer is gone without whom the device might wait for ever."""
        for gone in self.detector.lost(self):
            if gone.kind != FailureKind.LEFT:  # one that has left has done its part
                raise gone.error()

    def explain(self, error: Exception, *, peer: int, what: str) -> PenstockError:
        """A message that could not be posted is missing at its other end, where all later ones would be taken for the one before
        them: communicators are made anew before the next step. All ranks know that before they hear that this step has failed."""
        told = super().explain(error, peer=peer, what=what)
        if self._torn is None and told is not error:
            self._torn = FailureRecord(self.rank, cause=f"{type(told).__name__}: {told}")
            self._tell_torn()
        return told

    def _way(self, peer: int) -> Way:
        if peer not in self._ways:
            self._ways[peer] = Way(self.peer(peer), self)
        return self._ways[peer]

    def begin_step(self) -> int:
        self._renew()
        return super().begin_step()

    def _begin_collective(self) -> None:
        self._renew()
        super()._begin_collective()

    def _renew(self) -> None:
        if self._torn is not None or (not self._fine and self.store.check(f"torn/{self.generation}")):
            try:
                self._rejoin()
            except (PenstockError, RuntimeError) as error:  # one is gone for good: what was wrong before still is
                self.break_connections(FailureRecord.of(error, self.rank))

    def end_step(self, *, fine: bool = True) -> None:
        self._fine = fine
        for way in self._ways.values():
            with suppress(RuntimeError):  # a communicator that was aborted has said so
                way.wait()
        super().end_step(fine=fine)

    def _rejoin(self) -> None:
        """After connections were broken: if all processes live, all of them make new ones, and their steps go on."""
        self.epoch = self._agreed_epoch()
        self._abort()
        for way in self._ways.values():
            way.forget()
        # What was on communicators that were aborted is lost, and the device says so here. Streams that others have may be stuck.
        all_at_once([partial(torch.accelerator.synchronize, self.device)], bound=_FAREWELL)
        self.generation += 1
        self.whole, self._aborted = None, False
        self._torn, self._broken, self.failed = None, False, None
        self.detector.forget(self)
        self._switchboard.end(fine=False)  # sockets of before are given up; a step that goes well makes new ones
        self._gloo = self._in_host_memory()
        self._open(self._connected)

    def _agreed_epoch(self) -> int:
        """Wait until all ranks have said that they go on: the last one says so, unless one that cannot wait any longer has
        declined. From which step they go on comes back."""
        key = f"rejoin/{self.generation}"
        decided = self.store.check(key)  # a rank that comes here again counts once
        self.store.set(f"{key}/{self.rank}", str(self.epoch).encode())
        if not decided and self.store.add(f"{key}/ranks", 1) == self.num_ranks:
            epochs = [int(self.store.get(f"{key}/{rank}", self.timeout)) for rank in range(self.num_ranks)]
            self.store.first(key, f"go {max(epochs)}".encode())
        try:
            answer = self.store.get(key, self.timeout, look=partial(self._look_for_absent, time.monotonic()))
        except PenstockError as error:
            declined = FailureRecord(self.rank, cause=f"{type(error).__name__}: {error}")
            answer = self.store.first(key, declined.encode())
            if not answer.startswith(b"go "):
                raise
        if answer.startswith(b"go "):
            return int(answer[3:])
        raise FailureRecord.decode(answer).error()

    def _look_for_absent(self, since: float) -> None:
        """Raise if a rank is gone for good; one that was stopped may go on, within a heartbeat."""
        for gone in self.detector.lost(self):
            if gone.kind != FailureKind.STOPPED or time.monotonic() - since > max(heartbeat(), 1.0):
                raise gone.error()

    def _tell_torn(self) -> None:
        with suppress(TransportError):
            self.store.set(f"torn/{self.generation}", b"1")

    def break_connections(self, record: FailureRecord) -> None:
        super().break_connections(record)
        self._tell_torn()
        self._abort()

    def _abort(self) -> None:
        if not self._aborted:
            self._aborted = True
            all_at_once([each.abort for each in self._communicators()], _ABORT)

    def close(self) -> None:
        ended = self._closed or self._aborted or os.getpid() != self._owner  # a forked child has no device
        communicators = [] if ended else self._communicators()
        ends, bound = [each.shutdown for each in communicators], _SHUTDOWN
        try:
            if communicators:
                self._finish()
        except StepTimeout:  # the device waits for what never comes
            ends, bound = [each.abort for each in communicators], _ABORT
        finally:  # a device that fails says so, and the others hear all the same that this rank has left
            super().close()
        all_at_once(ends, bound)

    def _finish(self) -> None:
        """Let the device do what it was told: some of it may still be on its way to others, who wait for it."""
        try:
            well = self._fine and not last_words()
            wait_for_device(self.device, self.timeout if well else _FAREWELL, look=self._look_for_others)
        except (PeerFailed, TransportError):
            wait_for_device(self.device, _FAREWELL)

    def _look_for_others(self) -> None:
        """Raise if nobody is there any more who could wait for this rank, or one is gone without a word."""
        left, gone = split_by_farewell(self.detector.lost(self))
        if gone or (left and self._connected <= left.keys()):
            raise (gone or list(left.values()))[0].error()


class Control(Messages):
    """The messages in host memory of a transport whose other messages are not."""

    def __init__(self, transport: AcceleratorTransport) -> None:
        self.rank, self.num_ranks, self.timeout = transport.rank, transport.num_ranks, transport.timeout
        self.device = torch.device("cpu")
        self._transport = transport

    @property
    def awaited(self) -> int | None:
        return self._transport.awaited

    @awaited.setter
    def awaited(self, peer: int | None) -> None:
        self._transport.awaited = peer

    def sender(self, peer: int) -> Send:
        return DistributedTransport.sender(self._transport, peer)

    def receiver(self, peer: int) -> Receive:
        return DistributedTransport.receiver(self._transport, peer)

    def waiter(self) -> Callable[[Work], object]:
        return DistributedTransport.waiter(self._transport)

    def explain(self, error: Exception, *, peer: int, what: str) -> PenstockError:
        return self._transport.explain(error, peer=peer, what=what)


class Way:
    """The communicators between this rank and a peer. Before the first message they are made and used once."""

    def __init__(self, peer: int, transport: AcceleratorTransport) -> None:
        self._peer, self._transport = peer, transport
        one = transport.queues == "one"
        self._there = peer if one else int(transport.rank < peer)  # the peer's rank in a communicator of all, or of two
        self._sent: deque[tuple[Posted, Tensor]] = deque()  # on its way, and kept alive until it is there
        self.pair: tuple[Communicator, Communicator] | None = None  # to the peer, and back

    def open(self) -> tuple[Communicator, Communicator]:
        """Both communicators. They are made and used once: the host waits for the peer, here and never again."""
        if self.pair is not None:
            return self.pair
        transport, lower = self._transport, self._transport.rank < self._peer
        if transport.queues == "one":
            assert transport.whole is not None, "it is made before the first pair is opened"
            out = back = transport.whole
        else:
            pair = sorted((transport.rank, self._peer))
            names = ("both",) if transport.queues == "pair" else ("up", "down")
            made = [transport.communicator(f"{pair[0]}-{pair[1]}/{name}", pair) for name in names]
            out, back = (made[0], made[-1]) if lower else (made[-1], made[0])
        self.pair = out, back
        for use in (out.send, back.recv) if lower else (back.recv, out.send):
            use([torch.zeros(1, dtype=torch.uint8, device=transport.device)], self._there, _TAG).wait()
        return self.pair

    def send(self, tensors: list[Tensor]) -> None:
        """Nobody waits for a send: it is forgotten when it is done, which is asked without waiting."""
        out = (self.pair or self.open())[0]
        sent, tensor = self._sent, _as_carried(tensors[0])
        while sent and sent[0][0].is_completed():
            sent.popleft()[0].wait()  # nothing waits, but the memory is now seen to be free on this stream as well
        sent.append((self._posted(out.send, tensor), tensor))

    def receive(self, tensors: list[Tensor]) -> Work:
        return self._posted((self.pair or self.open())[1].recv, _as_carried(tensors[0]))

    def _posted(self, post: Callable[[list[Tensor], int, int], Posted], tensor: Tensor) -> Posted:
        try:
            return post([tensor], self._there, _TAG)
        except (TypeError, ValueError) as error:  # groups that are written in Python raise what they like
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    def wait(self, timeout: timedelta | None = None, /) -> None:
        """After a send, or a step: what comes on the current stream, perhaps a change of what was sent, waits for the sends."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def forget(self) -> None:
        """Before the next message new communicators are made."""
        self.pair = None
        self._sent.clear()


def _as_carried(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in _CARRIED else tensor.view(-1).view(torch.uint8)


def _current(device: torch.device) -> torch.device:
    """The device with its number, by which communicators know it, and made the current one: events and statistics go by that."""
    if device.index is None:
        return torch.device(device.type, torch.accelerator.current_device_index())
    torch.accelerator.set_device_index(device.index)
    return device
