"""A process group's side in host memory: for small things that processes tell one another without asking their devices.

    host_group(mesh.get_group()).sum(flags)        # all processes of the group; the tensor is in host memory

Data-parallel replicas meet in the middle of a step, in waits that nothing but the group's own timeout would end if one of them
is stopped or its host is gone. So each group has a heartbeat (`penstock.comm.pulse`) while a step is on: whoever is silent is
named, and the connections are broken by force, which ends the waits.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from operator import methodcaller

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.comm.distributed import (
    SIDE_TAG,
    Gloo,
    connection_lost,
    end_waits,
    folder_of_group,
    gloo_of,
    place_in_store,
    ran_out,
)
from penstock.comm.messages import Messages, Receive, Send, Work
from penstock.comm.pulse import Pulse, heartbeat, own_address
from penstock.comm.store import DistributedStore, cloned
from penstock.errors import PenstockError, ReplicaFailed, StepTimeout, TransportError
from penstock.health.failure import FailureRecord

_GRACE = 0.5  # seconds that a process whose connection is lost may take to end


class HostGroup:
    """The processes of a group, over its own gloo; or, if it has none, one that is made beside it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        place = place_in_store(folder_of_group(group, "host"))
        self._gloo = gloo_of(group, place)
        self._ranks = dist.get_process_group_ranks(group)
        self._rank = group.rank()
        patience = heartbeat()
        self._store = DistributedStore(cloned(place), group.rank(), group.size(), bound=patience)
        self._pulse = Pulse(group.rank(), self._store, patience=patience, address=own_address())
        self._others = {*range(group.size())} - {group.rank()}
        self._steps = 0  # that are on: stages of one process may share the group
        self._lost: FailureRecord | None = None
        self._watcher: threading.Thread | None = None

    def sum(self, tensor: Tensor) -> None:
        """Make the tensor the sum over all processes. The wait has the bound of the group."""
        self._gloo.allreduce([tensor]).wait()

    @cached_property
    def messages(self) -> Messages:
        """For collectives over all replicas."""
        return _ReplicaMessages(self, self._gloo, self._rank, len(self._ranks))

    # -- steps

    def begin(self) -> None:
        """A step begins in which the processes wait for one another."""
        if self._lost is not None and self._lost.rank != self._rank:
            raise self._failure(self._lost, " before this step. Start the job again, from a checkpoint if there is one")
        self._steps += 1
        if self._watcher is None and self._pulse.patience and self._others:
            self._watcher = threading.Thread(
                target=_watch, args=(weakref.ref(self),), name="penstock replicas", daemon=True
            )
            self._watcher.start()

    def end(self) -> None:
        self._steps = max(0, self._steps - 1)

    def explain(self, error: BaseException) -> ReplicaFailed | None:
        """What an error of a step has to do with a process of this group that is gone; None: nothing."""
        if self._lost is None and isinstance(error, RuntimeError) and not isinstance(error, PenstockError):
            if not connection_lost(str(error)):
                return None
            end = time.monotonic() + _GRACE
            while (gone := self._gone()) is None and time.monotonic() < end:
                time.sleep(0.05)
            self._lost = gone
            # For those who wait for this process and have no connection to the other.
            end_waits(self._gloo)
        return None if self._lost is None or self._lost.rank == self._rank else self._failure(self._lost)

    def give_up(self, cause: str) -> None:
        """This process will never come to a meeting again: tell the others, and do not let them wait."""
        if self._lost is None:
            self._lost = FailureRecord(self._rank, cause=f"its pipeline cannot go on: {cause}")
            with suppress(TransportError):
                self._store.set(f"gone/{self._rank}", self._lost.encode())
            end_waits(self._gloo)

    def _gone(self) -> FailureRecord | None:
        """Whose process has ended, or who has given up."""
        ended, posted = self._pulse.ended(), dict[int, FailureRecord]()
        with suppress(TransportError):
            for rank in sorted(self._others) if ended is None else [ended.rank]:
                if self._store.check(f"gone/{rank}"):
                    posted[rank] = FailureRecord.decode(self._store.get(f"gone/{rank}", _GRACE))
        return blamed(ended, posted)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Around messages within the group: an error that has to do with a process that is gone says so."""
        try:
            yield
        except RuntimeError as error:
            raise self.explain(error) or error from None

    def names(self, ranks: list[int]) -> str:
        """Ranks in the group as those of the job."""
        return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(self._ranks[rank]) for rank in ranks)

    def _failure(self, lost: FailureRecord, when: str = "") -> ReplicaFailed:
        return ReplicaFailed(
            f"{self.names([lost.rank])} of the job, which holds the same stage in another data-parallel replica, failed"
            f"{when}: {lost.cause}"
        )

    def _look(self) -> None:
        """In the thread of the watcher."""
        with suppress(PenstockError):
            self._pulse.watch(self._others)
        silent = self._pulse.look()
        if silent is not None and self._lost is None and self._steps:
            self._lost = silent
            end_waits(self._gloo)


class _ReplicaMessages(Messages):
    """Messages by a group's gloo, under a tag of penstock's own. The waits have the bound of the group."""

    def __init__(self, group: HostGroup, gloo: Gloo, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks, self.device = rank, num_ranks, torch.device("cpu")
        self._group, self._gloo = weakref.proxy(group), gloo

    def sender(self, peer: int) -> Send:
        return partial(self._gloo.send, dstRank=self.peer(peer), tag=SIDE_TAG)

    def receiver(self, peer: int) -> Receive:
        return partial(self._gloo.recv, srcRank=self.peer(peer), tag=SIDE_TAG)

    def waiter(self) -> Callable[[Work], object]:
        return methodcaller("wait")

    def explain(self, error: Exception, *, peer: int, what: str) -> PenstockError:
        found: ReplicaFailed | None = self._group.explain(error)
        if found is None and ran_out(str(error)):
            return StepTimeout(f"{self._group.names([peer])} of the job never came: {what}")
        return found or TransportError(f"{what}, {self._group.names([peer])} of the job: {error}")


def blamed(ended: FailureRecord | None, posted: Mapping[int, FailureRecord]) -> FailureRecord | None:
    """The process that has ended, in its own words if it left some. Who has given up did so because of it, perhaps."""
    if ended is not None:
        return posted.get(ended.rank, ended)
    return next(iter(posted.values()), None)


def _watch(of: weakref.ref[HostGroup]) -> None:
    while (found := of()) is not None:
        tick = found._pulse.tick
        if found._steps:
            with suppress(TransportError):
                found._look()
        del found
        time.sleep(tick)


def host_group(group: dist.ProcessGroup) -> HostGroup:
    """The one of this group. All processes of the group come here together the first time."""
    if group not in _OF_GROUP:
        _OF_GROUP[group] = HostGroup(group)
    return _OF_GROUP[group]


_OF_GROUP: weakref.WeakKeyDictionary[dist.ProcessGroup, HostGroup] = weakref.WeakKeyDictionary()
