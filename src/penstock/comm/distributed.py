"""Messages over torch.distributed, in host memory: by gloo's own calls, over the group's gloo or one of penstock's own."""

from __future__ import annotations

import atexit
import hashlib
import os
import sys
import time
import weakref
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from operator import methodcaller
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store, _get_process_group_name

from penstock.comm.farewell import Farewell
from penstock.comm.line import Line
from penstock.comm.messages import Messages, Receive, Send, Work
from penstock.comm.store import DistributedStore, cloned, innermost
from penstock.comm.switchboard import Switchboard
from penstock.comm.transport import Transport
from penstock.errors import PenstockError, RanksDisagree, StepTimeout, TransportError
from penstock.health.failure import NOBODY, FailureKind, FailureRecord
from penstock.health.monitor import HealthMonitor
from penstock.health.position import table
from penstock.health.rendezvous import heartbeat, own_address

HOST_TAG = 0x9E57  # of every message; a user's own messages on the group have other tags
_BREAK_TAG = 0x9E58  # nothing is ever sent under it
SIDE_TAG = 0x9E59  # of collectives, which never meet messages of a step
_SEE_OFF = 10.0  # seconds that the process which holds the store stays for the others at the end
_EXPLAIN = 3.0  # and after a failure, for them to find out there who has failed
_CAUSE_GRACE = 0.5  # seconds that the reason for a lost connection may take to reach this rank


class Gloo(Protocol):
    """What penstock asks of a gloo, which carries messages in host memory. Its stubs lack the calls."""

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> Work: ...

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> Work: ...

    def allreduce(self, tensors: list[Tensor]) -> Work: ...


class DistributedTransport(Transport):
    """A process group as a transport; ranks are ranks in the group. Every rank of the group makes one.

    transport = DistributedTransport.of(mesh.get_group("pp"))
    """

    _broken = _in_step = _closed = _left_well = _alike = False

    def __init__(self, group: dist.ProcessGroup | None = None, *, device: torch.device | str = "cpu") -> None:
        super().__init__()
        group = _member(group)
        self.device = torch.device(device)
        self.rank = group.rank()
        self.num_ranks = group.size()
        patience = heartbeat()
        self.folder = folder_of_group(group, "pipeline")
        self.place = place_in_store(self.folder)
        own = cloned(self.place)  # a connection of our own, whose waits we may bound
        self.store: DistributedStore = DistributedStore(own, self.rank, self.num_ranks, bound=patience)
        self.unlike: str | None = None  # where ranks are on different kinds of device: which, as soon as it is known
        self.backend = backend_of(group, self.device)
        self.backend_name = _backend_name(group, self.device)
        self.bound = timeout_of(self.backend)
        self.timeout = self.bound.total_seconds()
        self._group = weakref.ref(group)
        self.detector = monitor_of_process(patience)
        self.detector.join(self, self.folder, self.store)
        own_gloo = self.device.type != "cpu" or not isinstance(self.backend, dist.ProcessGroupGloo)
        self._compare_device_types(self.timeout if own_gloo else None)  # all ranks together make one
        self._gloo = self._in_host_memory(group)
        self.store.everybody = weakref.WeakMethod(self.everybody)
        holds = "server=TCPServer" in str(innermost(_get_default_store()))
        if holds:
            self.store.set("holder", str(self.rank).encode())
        whole = PrefixStore("penstock/job", own.underlying_store)
        self.farewell = Farewell(self.store.beside(whole), dist.get_rank(), dist.get_world_size(), holds=holds)
        self._switchboard = Switchboard(self.rank, self.store)
        self._waiter: tuple[float, Callable[[Work], object]] = (-1.0, methodcaller("wait"))
        self._torn: FailureRecord | None = None  # why the connections of this group are of no use any more
        self._owner = os.getpid()
        _OPEN.add(self)

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None, *, device: torch.device | str = "cpu") -> DistributedTransport:
        """The one transport of the group: all schedules on it share it, so that their steps are counted together.

        Where there are several kinds of device, all ranks ask for them in the same order.
        """
        group = _member(group)
        transports = _OF_GROUP.setdefault(group, {})
        kind = torch.device(device).type
        if kind in transports and transports[kind].unlike is not None:
            transports.pop(kind).close()  # the others begin anew too
        if kind not in transports:
            made = cls
            if kind != "cpu":
                from penstock.comm.accelerator import AcceleratorTransport as made
            transports[kind] = made(group, device=device)
        return transports[kind]

    def _in_host_memory(self, group: dist.ProcessGroup) -> Gloo:
        """The gloo that carries messages in host memory."""
        return gloo_of(group, self.place)

    def _compare_device_types(self, patience: float | None = None) -> None:
        """Raise if ranks are known to be on different types of device: a rank on an accelerator would wait for connections, one
        in host memory in its first collective. With `patience`, wait until all ranks have said what they are on."""
        mine = f"rank {self.rank}: {self.device.type}"
        first = self.store.first("device type", mine.encode()).decode(errors="replace")
        if first.partition(": ")[2] != self.device.type:
            told = sorted((first, mine), key=lambda one: int(one.split()[1].rstrip(":")))
            self.store.first("device types", ", ".join(told).encode())
        elif self.store.add("device type/ranks", 1) == self.num_ranks:
            self.store.first("device types", b"alike")
        if patience is not None:
            self._raise_if_unlike(patience)

    def _raise_if_unlike(self, patience: float) -> None:
        """Wait until all ranks have said what they are on; those that never will are named."""
        told = self.store.get("device types", patience, look=self._raise_if_lost).decode(errors="replace")
        if told != "alike":
            self.unlike = (
                f"the stages of a pipeline are on different kinds of device ({told}); give the stages of every rank a device "
                "of the same kind"
            )
            raise RanksDisagree(self.unlike)
        self._alike = True

    def _raise_if_lost(self) -> None:
        for gone in self.detector.lost(self):
            raise gone.error()

    # -- messages

    def connect(self, peers: Collection[int]) -> None:
        parent, children = self.family()
        everyone = {*peers, *children, *([] if parent is None else [parent])}
        if self.store.check("holder"):
            self.store_holder = int(self.store.get("holder", self.timeout))
        for peer in everyone:
            self._line(peer)
        self._switchboard.connect(everyone)

    def sender(self, peer: int) -> Send:
        return self._line(peer).send

    def receiver(self, peer: int) -> Receive:
        return self._line(peer).receive

    def _line(self, peer: int) -> Line:
        return self._switchboard.line(peer, *self._backend_calls(peer))

    def _backend_calls(self, peer: int) -> tuple[Send, Receive]:
        # The backend itself, not the group: one dispatch less for each message.
        send, receive, number = self._gloo.send, self._gloo.recv, self.peer(peer)
        return partial(send, dstRank=number, tag=HOST_TAG), partial(receive, srcRank=number, tag=HOST_TAG)

    def side_messages(self) -> Messages:
        return SideMessages(self)

    def waiter(self) -> Callable[[Work], object]:
        if self._waiter[0] != self.timeout:
            self._waiter = self.timeout, methodcaller("wait", timedelta(seconds=self.timeout))
        return self._waiter[1]

    def explain(self, error: Exception, *, peer: int, what: str) -> PenstockError:
        if isinstance(error, PenstockError):
            return error
        if self.unlike is not None:
            return RanksDisagree(self.unlike)
        if self._torn is not None:
            return self._since_torn(self._torn)
        text = str(error)
        timed_out = ran_out(text)
        if not timed_out and not connection_lost(text):
            return TransportError(f"rank {self.rank}, {what}, rank {peer}: {text}")
        known = self.detector.cause(self, 0.0 if timed_out else _CAUSE_GRACE)
        if known is not None:
            self._torn = known
            return known.error()
        if timed_out:
            late = f"rank {self.rank} waited {self.timeout:g} s for {what}, rank {peer}"
            self._torn = FailureRecord(self.rank, cause=f"StepTimeout: {late}", kind=FailureKind.TIMEOUT)
            others = self.everybody()  # before they hear of the failure, and go on
            self.report_failure(self._torn)
            return StepTimeout(f"{late}\n{others}")
        cause = f"connection lost during {what}: {text.split('] ', 1)[-1]}"
        self._torn = self.report_failure(FailureRecord(peer, cause=cause, kind=FailureKind.UNREACHABLE))
        return self._torn.error()

    def everybody(self) -> str:
        """Asked over the links: the monitors of the others answer, whatever their main threads do."""
        return table([self.where(), *self.detector.positions(self)], num_ranks=self.num_ranks)

    @property
    def unusable(self) -> str | None:
        return None if self._torn is None else self._torn.cause

    def lost(self) -> FailureRecord | None:
        return self._torn or next(iter(self.detector.lost(self)), None)

    def is_gone(self) -> bool:
        group = self._group()
        try:
            return group is None or dist.get_rank(group) < 0
        except (ValueError, KeyError, RuntimeError):  # there is no such group any more
            return True

    def _since_torn(self, reason: FailureRecord) -> PenstockError:
        """Why a message of this step came to nothing: another rank has failed, or this one earlier."""
        return self._unusable(reason) if reason.rank == self.rank else reason.error()

    def _unusable(self, reason: FailureRecord) -> TransportError:
        whose = {self.rank: "this rank", NOBODY: "the store"}.get(reason.rank, f"rank {reason.rank}")
        return TransportError(
            f"rank {self.rank}: the connections of this process group are closed since {whose} failed: {reason.cause}. "
            "Start the job again, from a checkpoint if there is one; if all processes live, make a new process group"
        )

    def failure(self) -> FailureRecord | None:
        return self.detector.known(self)

    def report_failure(self, record: FailureRecord) -> FailureRecord:
        return self.detector.report(self, record)

    # -- steps

    def begin_step(self) -> int:
        if self._torn is not None:
            self.epoch += 1
            self.report_failure(self._torn)  # for ranks whose own connections were not touched
            raise self._unusable(self._torn)
        super().begin_step()
        self._in_step = True
        self._switchboard.begin(self.epoch)
        self.detector.begin(self)
        return self.epoch

    def _begin_collective(self) -> None:
        if self._torn is not None:
            raise self._unusable(self._torn)
        if self._in_step:  # which is watched, and goes on
            self.in_collective = None
        elif self.num_ranks > 1:
            self.failed = None
            self.detector.begin(self, repr(self.in_collective))
            if not self._alike:
                self._raise_if_unlike(self.timeout)

    def _end_collective(self) -> None:
        if self._in_step:
            return
        self.detector.end(self)
        if self._torn is not None:
            self.break_connections(self._torn)  # so that nobody waits for this rank

    def end_step(self, *, fine: bool = True) -> None:
        self._in_step = False
        self.detector.end(self)
        if self._torn is not None:
            self.break_connections(self._torn)  # so that nobody waits for this rank in a later step
        else:
            self._switchboard.end(fine=fine)

    def break_connections(self, record: FailureRecord) -> None:
        """End this rank's waits by force, with ``record`` as the reason. The group cannot be used afterwards."""
        if self.num_ranks == 1 or self._broken:
            return
        self._torn, self._broken = self._torn or record, True
        self._switchboard.close()
        end_waits(self._gloo)

    def give_up(self, cause: str) -> None:
        if self._torn is None:
            self._torn = self.report_failure(FailureRecord(self.rank, cause=cause, kind=FailureKind.LEFT))
        self.break_connections(self._torn)

    def close(self) -> None:
        """Leave for good. A step that failed, or is not over, does not count as one that this rank has done."""
        if self._closed or os.getpid() != self._owner:  # a forked child does not leave in its parent's name
            return
        self._closed = True
        # First the reason: a rank that sees that its connections end asks why.
        self._left_well = whole = not self._in_step and self.failure() is None
        done = self.epoch if whole else self.epoch - 1
        self.detector.leave(self, steps=done, cause=f"it left after step {done}{last_words()}")
        self._switchboard.close()


class SideMessages(Messages):
    """Messages by the transport's gloo alone, under a tag of their own."""

    def __init__(self, transport: DistributedTransport) -> None:
        self.rank, self.num_ranks = transport.rank, transport.num_ranks
        self.device = torch.device("cpu")
        self._transport = transport

    @property
    def awaited(self) -> int | None:
        return self._transport.awaited

    @awaited.setter
    def awaited(self, peer: int | None) -> None:
        self._transport.awaited = peer

    def sender(self, peer: int) -> Send:
        return partial(self._transport._gloo.send, dstRank=self.peer(peer), tag=SIDE_TAG)

    def receiver(self, peer: int) -> Receive:
        return partial(self._transport._gloo.recv, srcRank=self.peer(peer), tag=SIDE_TAG)

    def waiter(self) -> Callable[[Work], object]:
        return DistributedTransport.waiter(self._transport)

    def explain(self, error: Exception, *, peer: int, what: str) -> PenstockError:
        return self._transport.explain(error, peer=peer, what=repr(self._transport.in_collective or what))


_OPEN: weakref.WeakSet[DistributedTransport] = weakref.WeakSet()
_OF_GROUP: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, DistributedTransport]] = weakref.WeakKeyDictionary()


_MONITORS: dict[tuple[str, float], HealthMonitor] = {}


def monitor_of_process(heartbeat: float) -> HealthMonitor:
    """The monitor of this process, with all its groups; another one only for another network or heartbeat."""
    inner = innermost(_get_default_store())
    key = own_address(getattr(inner, "host", None), getattr(inner, "port", None)), heartbeat
    if key not in _MONITORS or _MONITORS[key].owner != os.getpid():  # those of a parent are closed
        _MONITORS[key] = HealthMonitor(key[0], heartbeat=heartbeat)
    return _MONITORS[key]


@atexit.register
def close_all() -> None:
    """Close every transport of this process; done by itself when the program ends. Ctrl-C ends the wait for the others."""
    leaving = [transport for transport in _OPEN if transport._owner == os.getpid()]
    with ExitStack() as all_of_them:  # each of them, even if one raises
        all_of_them.callback(_part_from, leaving)
        for transport in leaving:
            all_of_them.callback(transport.close)


def _part_from(leaving: list[DistributedTransport]) -> None:
    for transport in leaving:
        transport.farewell.say()
    now = time.monotonic()
    with suppress(KeyboardInterrupt):
        for transport in leaving:
            if transport.farewell.holds:
                transport.farewell.see_off(now + (_SEE_OFF if transport._left_well else _EXPLAIN))


def last_words() -> str:
    """The exception that ends this program, if one does."""
    error = getattr(sys, "last_value", None)
    return "" if error is None else f": {type(error).__name__}: {error}"


def _member(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        if not dist.is_initialized():
            raise TransportError("there is no process group; call torch.distributed.init_process_group first")
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TransportError(f"this process is no member of the group ({group!r}); give a group that holds it")
    return group


def _backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend of the group for a device, as in `init_process_group("cpu:gloo,cuda:nccl")`."""
    known = dict(part.split(":") for part in dist.get_backend_config(group).split(",") if ":" in part)
    return str(known.get(device.type, dist.get_backend(group)))


def backend_of(group: dist.ProcessGroup, device: torch.device) -> object:
    """What the group uses for tensors on this device. A group that is written in Python is its own backend."""
    known = {found.type: found for found in group._device_types}
    if not known:
        return group
    found = group._get_backend(known.get(device.type, next(iter(known.values()))))
    return getattr(found, "wrapped_pg", found)  # TORCH_DISTRIBUTED_DEBUG=DETAIL puts a backend into another


def gloo_of(group: dist.ProcessGroup, place: Store) -> Gloo:
    """What carries messages in host memory: the group's own gloo, or one of penstock's own beside it.

    Others may keep messages to different ranks in one order, and have no way to end a wait.
    """
    found = backend_of(group, torch.device("cpu"))
    if not isinstance(found, dist.ProcessGroupGloo):
        place = PrefixStore("control", place)
        found = dist.ProcessGroupGloo(place, group.rank(), group.size(), timeout_of(found))
    return cast("Gloo", found)


def timeout_of(backend: object) -> timedelta:
    """How long a backend waits. Of one that does not tell, the job's store knows what the whole job was given."""
    of_job = _get_default_store().timeout  # type: ignore[attr-defined]  # its stubs lack it
    bound: timedelta = getattr(getattr(backend, "options", None), "_timeout", of_job)
    return bound


def folder_of_group(group: dist.ProcessGroup, what: str) -> str:
    """Where in the job's store this group, in this life of it, has its keys: groups side by side, and one made again, must
    not meet."""
    ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
    name = hashlib.sha1(f"{_get_process_group_name(group)}|{ranks}|{what}".encode()).hexdigest()[:16]
    return f"penstock/{name}/{_get_default_store().add(f'penstock/{name}/lives/{group.rank()}', 1)}"


def place_in_store(folder: str) -> PrefixStore:
    """The part of the job's store under this folder."""
    return PrefixStore(folder, _get_default_store())


def end_waits(gloo: Gloo) -> None:
    """A wait of gloo cannot be called back; but one that runs out closes all connections, and with them all waits."""
    for peer in range(gloo.size()):  # one that is closed already lets nothing run out
        try:
            if peer != gloo.rank():
                gloo.recv([torch.empty(1)], peer, _BREAK_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if ran_out(str(error)):
                return


def ran_out(text: str) -> bool:
    return "Timed out" in text or "timed out" in text


def connection_lost(text: str) -> bool:
    of_gloo = ("onnection closed", "onnection reset", "onnection refused", "roken pipe", "ocket closed", "pair.cc")
    of_nccl = ("ncclRemoteError", "NCCL communicator was aborted")
    return any(sign in text for sign in of_gloo + of_nccl)
