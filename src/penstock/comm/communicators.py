"""Communicators of penstock's own: made with what the user's group has, and ended together.

    maker = Maker("nccl", backend, timedelta(minutes=10))      # of the user's group
    communicator = maker.make("penstock/0-1/up", store, rank=0, ranks=[4, 6])
    all_at_once([communicator.abort, other.abort], bound=10.0)

A communicator is made by itself and not as a group of torch's list of groups, since making one of those is a matter of all
processes of the world (for NCCL with `device_id` even of those that it does not concern).

Note "all at once". To abort a communicator frees memory of the device, which waits for everything that runs there, also for
messages of other communicators that will never come. So whoever aborts several tells all of them before it waits for any. A
collective of the user's own may still hold them up; they are then left to end behind the caller's back.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Backend, Store

from penstock.comm.messages import Work
from penstock.errors import TransportError

_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # abort the communicator, let the process live
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # and do so at once
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",  # where messages queue, their order was proved
}
"""What torch reads from the environment when a communicator is made: above all, how its watchdog treats an error.

By itself it ends the process: then nobody would raise PeerFailed, and no checkpoint would be written."""


class Posted(Work, Protocol):
    """A message of a communicator, which can be asked whether it is through."""

    def is_completed(self) -> bool: ...


class Communicator(Protocol):
    """What carries messages between accelerators: a backend of torch's, or of another maker's."""

    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Posted: ...

    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> Posted: ...

    def abort(self) -> None: ...

    def shutdown(self) -> None: ...


@dataclass(frozen=True)
class Maker:
    """What makes communicators like the user's group."""

    kind: str  # "nccl"
    like: object  # the backend of the user's group
    timeout: timedelta

    def make(self, name: str, store: Store, *, rank: int, ranks: Sequence[int]) -> Communicator:
        """One that ``ranks`` of the whole job have together, of which this process is number ``rank``.

        All of them make it under the same name, which no other has, and the same keys of the store: some backends find one
        another by the one, some by the other.
        """
        maker = getattr(dist, f"ProcessGroup{self.kind.upper()}", None)
        if maker is not None and hasattr(maker, "Options"):
            options, given = maker.Options(), getattr(self.like, "options", None)
            for field in ("is_high_priority_stream", "config"):
                if hasattr(given, field):
                    setattr(options, field, getattr(given, field))
            options._timeout = self.timeout
            options.group_name, options.global_ranks_in_group = name, [*ranks]  # in torch's logs
            with _survivable():
                return cast("Communicator", maker(store, rank, len(ranks), options))
        plugin = Backend._plugins.get(self.kind.upper())
        if plugin is None:
            raise TransportError(
                f"penstock does not know how to make communicators of the backend {self.kind!r}; it knows nccl, xccl and those "
                "that are registered with torch.distributed.Backend.register_backend"
            )
        if not plugin.extended_api:
            return cast("Communicator", plugin.creator_fn(store, rank, len(ranks), self.timeout))
        options = distributed_c10d._DistributedBackendOptions()  # type: ignore[attr-defined]
        options.store, options.group_rank, options.group_size = store, rank, len(ranks)
        options.group_id, options.global_ranks_in_group, options.timeout = name, [*ranks], self.timeout
        return cast("Communicator", plugin.creator_fn(options, getattr(self.like, "options", None)))


@contextmanager
def _survivable() -> Iterator[None]:
    """What is made here does not end the process when it fails, unless the user has said how errors are to be treated."""
    given = {"TORCH_" + name.removeprefix("TORCH_") for name in os.environ}  # the older names lack that
    ours = {name: value for name, value in _SETTINGS.items() if name not in given}
    os.environ |= ours
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def all_at_once(acts: Sequence[Callable[[], object]], bound: float) -> None:
    """Do these beside one another, for no longer than the bound; what is not done by then goes on, and nobody waits for it.

    To abort a communicator ends what is on its way, to shut one down waits for it, which may take the other rank as well.
    """

    def quietly(act: Callable[[], object]) -> None:
        with suppress(Exception):  # it was ended before, or cannot be
            act()

    threads = [threading.Thread(target=quietly, args=(act,), name="penstock end", daemon=True) for act in acts]
    end = time.monotonic() + bound
    with suppress(RuntimeError):  # while the interpreter ends it starts none, and all end with it
        for thread in threads:
            thread.start()
    for thread in filter(threading.Thread.is_alive, threads):
        thread.join(max(0.0, end - time.monotonic()))
