"""On which devices the ranks of a run compute, and how they find one another, also after a crash.

Torch's launcher hands the store of the crashed ranks to those that it starts in their place, with all that they had
written there: a new rank may read the address of a dead one, and wait for it. So rank 0 thinks of a new name for each
life of the run, tells it to ranks that say that they are there now, and everything else happens under that name.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from penstock.comm.distributed import close_all
from penstock.errors import PenstockError, StepTimeout
from penstock.health.position import Whereabouts, table
from penstock.train.train_options import TrainOptions

_PATIENCE = 300.0  # seconds for all ranks to start
_NAP = 0.02


@contextmanager
def connected(options: TrainOptions) -> Iterator[None]:
    """Inside there is a default process group, made out of what torchrun has put into the environment; not for one rank alone."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "0")) or options.threads or 1)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    device, bound = where_of(options), None
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
        bound = device  # one communicator for the group, as torch recommends
    store, rank, size = next(rendezvous("env://"))
    fresh = PrefixStore(f"penstock/run/{agree_on_life(store, rank, size)}", store)
    backend = options.backend or dist.get_default_backend_for_device(device.type)
    dist.init_process_group(backend, store=fresh, rank=rank, world_size=size, device_id=bound)
    try:
        yield
    finally:
        close_all()
    dist.destroy_process_group()


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


def where_of(options: TrainOptions) -> torch.device:
    """The device of this rank: of an accelerator, that with the number of the rank on its host.

    >>> where_of(TrainOptions(device="cpu"))
    device(type='cpu')
    """
    kind = torch.device(options.device).type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))


def check_where(options: TrainOptions) -> None:
    """Say what is not there before any process is started."""
    try:
        device = torch.device(options.device)
    except RuntimeError as error:
        raise PenstockError(f"--device {options.device!r}: {str(error).partition(' device type at')[0]}") from error
    if device.index is not None:
        raise PenstockError(
            f"--device {options.device!r}; give the kind alone ({device.type}): each rank takes its own"
        )
    if options.backend is not None and not dist.is_backend_available(options.backend):
        names = {*dist.Backend.backend_list} - {"fake", "undefined"}
        known = sorted(filter(dist.is_backend_available, names))
        raise PenstockError(f"--backend {options.backend!r} is not in this torch; it has {', '.join(known)}")
    if device.type == "cpu":
        if options.backend in ("nccl", "xccl"):
            raise PenstockError(
                f"--backend {options.backend} has no messages for --device cpu; leave it out, or give gloo"
            )
        return
    try:
        count = int(torch.get_device_module(device).device_count())
    except (RuntimeError, AttributeError):
        count = 0
    if count < options.ranks * options.dp:
        raise PenstockError(
            f"--device {device.type}: {options.ranks * options.dp} ranks need a device each, and there are {count} here; give "
            "--device cpu, or fewer --ranks"
        )
