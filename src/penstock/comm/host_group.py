"""A process group's side in host memory: for small things that processes tell one another without asking their devices.

    host_group(mesh.get_group()).sum(flags)        # all processes of the group; the tensor is in host memory

Data-parallel replicas meet in the middle of a step, in waits that nothing but the group's own timeout would end if one of them
is stopped or its host is gone. So each group has a heartbeat (`penstock.health`) while a step is on: whoever is silent is
named, and the connections are broken by force, which ends the waits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
    monitor_of_process,
    place_in_store,
    ran_out,
)
from penstock.comm.messages import Messages, Receive, Send, Work
from penstock.comm.store import DistributedStore, cloned
from penstock.errors import PenstockError, ReplicaFailed, StepTimeout, TransportError
from penstock.health.failure import FailureKind, FailureRecord, split_by_farewell
from penstock.health.position import Whereabouts
from penstock.health.rendezvous import heartbeat

_GRACE = 0.5  # seconds that a process whose connection is lost may take to end


class HostGroup:
    """The processes of a group, over its own gloo; or, if it has none, one that is made beside it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        folder = folder_of_group(group, "host")
        place = place_in_store(folder)
        self._gloo = gloo_of(group, place)
        self.ranks = dist.get_process_group_ranks(group)
        self.rank, self.num_ranks = group.rank(), group.size()
        self.epoch = self.meetings = 0
        self.awaited: int | None = None
        self.failed: FailureRecord | None = None
        self._steps = 0  # that are on: stages of one process may share the group
        self._lost: FailureRecord | None = None
        patience = heartbeat()
        self._detector = monitor_of_process(patience)
        self._detector.join(self, folder, DistributedStore(cloned(place), self.rank, self.num_ranks, bound=patience))

    def sum(self, tensor: Tensor) -> None:
        """Make the tensor the sum over all processes. The wait has the bound of the group."""
        self._gloo.allreduce([tensor]).wait()

    @cached_property
    def messages(self) -> Messages:
        """For collectives over all replicas."""
        return _ReplicaMessages(self, self._gloo, self.rank, self.num_ranks)

    # -- steps

    def begin(self) -> None:
        """A step begins in which the processes wait for one another."""
        self._lost = self._lost or self._gone()
        if self._lost is not None and self._lost.rank != self.rank:
            raise self._failure(self._lost, " before this step. Start the job again, from a checkpoint if there is one")
        self._steps += 1
        self._detector.begin(self, "a step of data-parallel replicas")

    def end(self) -> None:
        self._steps = max(0, self._steps - 1)
        if not self._steps:
            self._detector.end(self)

    def explain(self, error: BaseException) -> ReplicaFailed | None:
        """What an error of a step has to do with a process of this group that is gone; None: nothing."""
        if self._lost is None and isinstance(error, RuntimeError) and not isinstance(error, PenstockError):
            if not connection_lost(str(error)):
                return None
            self._detector.cause(self, _GRACE)
            self._lost = self._gone()
            # For those who wait for this process and have no connection to the other.
            end_waits(self._gloo)
        return None if self._lost is None or self._lost.rank == self.rank else self._failure(self._lost)

    def give_up(self, cause: str) -> None:
        """This process will never come to a meeting again: tell the others, and do not let them wait."""
        if self._lost is None:
            self._lost = FailureRecord(self.rank, cause=f"its pipeline cannot go on: {cause}", kind=FailureKind.LEFT)
            self._detector.report(self, self._lost)
            end_waits(self._gloo)

    def _gone(self) -> FailureRecord | None:
        """Whose process has ended, or who has given up."""
        left, silent = split_by_farewell(self._detector.lost(self))
        return blamed(next(iter(silent), None), left)

    # -- what the monitor asks

    def break_connections(self, record: FailureRecord) -> None:
        if self._lost is None and self._steps:
            self._lost = record
            end_waits(self._gloo)

    def where(self) -> Whereabouts:
        return Whereabouts(self.rank, doing="is with its replicas")

    def is_gone(self) -> bool:
        return False

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Around messages within the group: an error that has to do with a process that is gone says so."""
        try:
            yield
        except RuntimeError as error:
            raise self.explain(error) or error from None

    def names(self, ranks: list[int]) -> str:
        """Ranks in the group as those of the job."""
        return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(self.ranks[rank]) for rank in ranks)

    def _failure(self, lost: FailureRecord, when: str = "") -> ReplicaFailed:
        return ReplicaFailed(
            f"{self.names([lost.rank])} of the job, which holds the same stage in another data-parallel replica, failed"
            f"{when}: {lost.cause}"
        )


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


def host_group(group: dist.ProcessGroup) -> HostGroup:
    """The one of this group. All processes of the group come here together the first time."""
    if group not in _OF_GROUP:
        _OF_GROUP[group] = HostGroup(group)
    return _OF_GROUP[group]


_OF_GROUP: weakref.WeakKeyDictionary[dist.ProcessGroup, HostGroup] = weakref.WeakKeyDictionary()
