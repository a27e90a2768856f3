"""Process groups of other makers: written in Python, without options, abort or batches, and found by their names."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from penstock.comm import DistributedTransport
from tests.accelerator.pipes import Trained, expected, train
from tests.accelerator.pool import SimPool
from tests.accelerator.test_device import loaded
from tests.gloo_pool import _free_port

STAGES, MICROBATCHES = 2, 6
BOUND = timedelta(seconds=17)
MADE: dict[str, list[int]] = {}  # the ranks of each group, by its name


class OwnWork(dist._Work):
    def __init__(self, inside: Any) -> None:
        super().__init__()
        self._inside = inside

    def wait(self, timeout: timedelta = BOUND) -> None:  # type: ignore[override]  # as many do, it gives nothing
        self._inside.wait()

    def is_completed(self) -> bool:
        return bool(self._inside.is_completed())


class OwnGroup(dist.ProcessGroup):
    """Messages and nothing else; its ranks meet under the name that they were given, wherever that is in the store."""

    def __init__(self, asked: Any, _: Any) -> None:
        super().__init__(asked.group_rank, asked.group_size)
        assert asked.group_id not in MADE, f"{asked.group_id} is there already"
        MADE[asked.group_id] = asked.global_ranks_in_group
        options = loaded().StrictGroup.Options()
        options._timeout = asked.timeout
        assert asked.timeout == BOUND
        place = asked.store if asked.group_id == "0" else PrefixStore(f"met/{asked.group_id}", _get_default_store())
        self._inside = loaded().StrictGroup(place, asked.group_rank, asked.group_size, options)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> OwnWork:  # type: ignore[override]
        return OwnWork(self._inside.send(tensors, peer, tag))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> OwnWork:  # type: ignore[override]
        return OwnWork(self._inside.recv(tensors, peer, tag))


def trained(device: torch.device, port: int) -> Trained:
    rank = dist.get_rank()
    dist.destroy_process_group()
    if "OWN" not in dist.Backend._plugins:
        dist.Backend.register_backend("own", OwnGroup, extended_api=True, devices=["sim"])
    MADE.clear()
    dist.init_process_group("own", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3, timeout=BOUND)
    found = train(device, "interleavedzerobubble", STAGES, MICROBATCHES)
    transport: Any = DistributedTransport.of(device=device)
    ours = [ranks for name, ranks in MADE.items() if name.startswith("penstock/")]
    assert sorted(ours) == sorted(sorted((rank, peer)) for peer in range(3) if peer != rank for _ in range(2)), MADE
    assert transport.timeout == BOUND.total_seconds()
    return found


def test_a_group_that_is_written_in_python_trains(sim: SimPool) -> None:
    """It has no backend, no options and no name of its own: each of these was taken for granted."""
    everyone = sim.run(3, "lazy", trained, _free_port())
    wanted = expected(3 * STAGES, MICROBATCHES)
    found = {name: grad for each in everyone for name, grad in each.grads.items()}
    assert found.keys() == wanted.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, wanted[name])
    for each in everyone:
        assert each.waits == each.violations == []
