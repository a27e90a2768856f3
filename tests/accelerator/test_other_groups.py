"""Process groups of other makers: written in Python, without options, abort or batches, and found by their names."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from penstock.comm import DistributedTransport
from penstock.lower import InTurn
from tests.accelerator.pipes import Trained, block, expected, train
from tests.accelerator.pool import SimPool
from tests.accelerator.test_boundaries_and_faults import MICROBATCHES as BATCHES
from tests.accelerator.test_boundaries_and_faults import raised_in_steps, schedule_of
from tests.accelerator.test_device import loaded
from tests.gloo_pool import free_port

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


class ShortGroup(OwnGroup):
    """Made the short way: its ranks meet in the store that they are given. Those of penstock's cannot be ended."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        dist.ProcessGroup.__init__(self, rank, size)
        self._users = not MADE
        MADE[f"penstock/{len(MADE)}"] = [*range(size)]
        options = loaded().StrictGroup.Options()
        options._timeout = timeout
        assert timeout == BOUND
        self._inside = loaded().StrictGroup(store, rank, size, options)

    def shutdown(self) -> None:
        if not self._users:  # torch ends that one
            raise ValueError("no")

    abort = shutdown


class FussyGroup(OwnGroup):
    """Refuses a message, when it is told to, in its own words."""

    refused = -1  # sends that go well before

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> OwnWork:
        FussyGroup.refused -= 1
        if FussyGroup.refused == -1:
            raise ValueError("not this one")
        return super().send(tensors, peer, tag)

    def abort(self) -> None:
        self._inside.abort()


def refused(device: torch.device, port: int) -> tuple[list[str], dict[str, torch.Tensor]]:
    rank = dist.get_rank()
    dist.destroy_process_group()
    if "FUSSY" not in dist.Backend._plugins:
        dist.Backend.register_backend("fussy", FussyGroup, extended_api=True, devices=["sim"])
    MADE.clear()
    dist.init_process_group("fussy", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3, timeout=BOUND)
    module = block(rank)
    schedule = schedule_of(device, module)
    found = raised_in_steps(schedule, device, 2)
    FussyGroup.refused = 1 if rank == 1 else -1
    found += raised_in_steps(schedule, device, 1)
    module.zero_grad()
    found += raised_in_steps(schedule, device, 1)
    return found, {f"{rank}.{name}": p.grad.cpu() for name, p in module.named_parameters() if p.grad is not None}


def test_a_message_that_a_group_refuses_does_not_shift_those_after_it(sim: SimPool) -> None:
    """The other end would take each message of the next step for the one before it, of the same size."""
    told = sim.run(3, "lazy", refused, free_port())
    for rank, (found, _) in enumerate(told):
        assert found[0] == found[1] == found[3] == "", found
        assert "ValueError: not this one" in found[2]
        assert found[2].startswith("TransportError: " if rank == 1 else "PeerFailed: rank 1 failed"), found
    grads = {name: grad for _, each in told for name, grad in each.items()}
    for name, grad in expected(3, BATCHES).items():
        torch.testing.assert_close(grads[name], grad)


def trained(device: torch.device, port: int, name: str, receives: InTurn | None) -> Trained:
    rank = dist.get_rank()
    dist.destroy_process_group()
    if "OWN" not in dist.Backend._plugins:
        dist.Backend.register_backend("own", OwnGroup, extended_api=True, devices=["sim"])
        dist.Backend.register_backend("short", ShortGroup, devices=["sim"])
    MADE.clear()
    dist.init_process_group(name, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3, timeout=BOUND)
    found = train(device, "interleavedzerobubble", STAGES, MICROBATCHES, receives=receives)
    transport: Any = DistributedTransport.of(device=device)
    ours = [ranks for name, ranks in MADE.items() if name.startswith("penstock/")]
    if name == "own":
        assert sorted(ours) == sorted(sorted((rank, peer)) for peer in range(3) if peer != rank for _ in range(2)), MADE
    else:
        assert len(ours) == 2  # the user's, and one
    assert transport.timeout == BOUND.total_seconds()
    return found


@pytest.mark.parametrize(("name", "receives"), [("own", None), ("short", InTurn("one"))])
def test_a_group_that_is_written_in_python_trains(sim: SimPool, name: str, receives: InTurn | None) -> None:
    """It has no backend, no options and no name of its own: each of these was taken for granted."""
    everyone = sim.run(3, "lazy", trained, free_port(), name, receives)
    wanted = expected(3 * STAGES, MICROBATCHES)
    found = {name: grad for each in everyone for name, grad in each.grads.items()}
    assert found.keys() == wanted.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, wanted[name])
    for each in everyone:
        assert each.waits == each.violations == []
