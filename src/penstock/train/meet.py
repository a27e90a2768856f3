"""How the ranks of a run find one another, also after a crash.

Torch's launcher hands the store of the crashed ranks to those that it starts in their place, with all that they had
written there: a new rank may read the address of a dead one, and wait for it. So rank 0 thinks of a new name for each
life of the run, tells it to ranks that say that they are there now, and everything else happens under that name.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from penstock.comm.whereabouts import Whereabouts, table
from penstock.errors import StepTimeout

_PATIENCE = 300.0  # seconds for all ranks to start
_NAP = 0.02


def connect(backend: str, device: torch.device) -> None:
    """Make the default process group out of what torchrun has put into the environment."""
    store, rank, size = next(rendezvous("env://"))
    fresh = PrefixStore(f"penstock/run/{agree_on_life(store, rank, size)}", store)
    bound = None if device.type == "cpu" else device  # one communicator for the group, as torch recommends
    dist.init_process_group(backend, store=fresh, rank=rank, world_size=size, device_id=bound)


def agree_on_life(store: Store, rank: int, size: int, *, patience: float = _PATIENCE) -> str:
    """The same new name on every rank, whatever the store holds of former lives."""
    end = time.monotonic() + patience
    if rank > 0:
        token = uuid.uuid4().hex
        store.set(f"penstock/here/{rank}", token)
        try:
            store.wait([f"penstock/answer/{token}"], timedelta(seconds=patience))
        except dist.DistError as error:
            raise StepTimeout(
                f"rank {rank} waited {patience:g} s for rank 0 to start, and it did not ({str(error).partition(chr(10))[0]})\n"
                f"{_starting(size, {rank: 0}, patience)}"
            ) from error
        name: str = store.get(f"penstock/answer/{token}").decode()
        store.set(f"penstock/{name}/{rank}", "heard")
        return name
    name = uuid.uuid4().hex
    waiting = set(range(1, size))
    while waiting:
        for other in sorted(waiting):
            if store.check([f"penstock/here/{other}"]):
                store.set(f"penstock/answer/{store.get(f'penstock/here/{other}').decode()}", name)
            if store.check([f"penstock/{name}/{other}"]):
                waiting.discard(other)
        if waiting and time.monotonic() > end:
            started = dict.fromkeys(set(range(size)) - waiting, None) | {0: min(waiting)}
            raise StepTimeout(
                f"rank 0 waited {patience:g} s for ranks {sorted(waiting)} to start, and they did not\n"
                f"{_starting(size, started, patience)}"
            )
        time.sleep(_NAP)
    return name


def _starting(size: int, started: dict[int, int | None], seconds: float) -> str:
    """A table of all ranks: those that have started, by whom they wait for, and the others, which do not answer."""
    rows = [
        Whereabouts(rank, doing="has started" if peer is None else "waits", peer=peer, seconds=seconds)
        for rank, peer in started.items()
    ]
    return table(rows, num_ranks=size)
