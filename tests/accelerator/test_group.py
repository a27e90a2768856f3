"""The strict process group keeps the rules of ProcessGroupNCCL, also where they hurt."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.accelerator.pool import Mode, SimPool
from tests.accelerator.test_device import loaded


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_messages_batches_and_collectives(sim: SimPool, mode: Mode) -> None:
    assert sim.run(3, mode, exchange, mode) == [True] * 3


def exchange(device: torch.device, mode: Mode) -> bool:
    sim, rank = loaded(), dist.get_rank()
    x, y = torch.full((4,), float(rank), device=device), torch.empty(4, device=device)
    for sender, receiver in ((0, 1), (1, 2), (1, 0)):
        if rank == sender:
            dist.isend(x, receiver).wait()
        if rank == receiver:
            dist.irecv(y, sender).wait()
    assert sim.waits() == [], sim.waits()
    names = [name.split("/")[-1] for name in sim.communicators()]
    assert names == {"lazy": {0: ["0:1"], 1: ["0:1", "1:2"], 2: ["1:2"]}[rank], "eager": ["all"]}[mode]
    batch = [dist.P2POp(dist.isend, x, (rank + 1) % 3), dist.P2POp(dist.irecv, y, (rank - 1) % 3)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert y.tolist() == [(rank - 1) % 3] * 4
    total = x.clone()
    dist.all_reduce(total)
    parts = [torch.empty_like(x) for _ in range(3)]
    dist.all_gather(parts, x)
    whole = torch.empty(12, device=device)
    dist.all_gather_into_tensor(whole, x)
    share = torch.empty(4, device=device)
    dist.reduce_scatter_tensor(share, whole, op=dist.ReduceOp.AVG)
    dist.broadcast(x, 2)
    assert total.tolist() == [3.0] * 4
    assert torch.cat(parts).tolist() == whole.tolist() == [0.0] * 4 + [1.0] * 4 + [2.0] * 4
    assert share.tolist() == [float(rank)] * 4
    assert x.tolist() == [2.0] * 4
    backend: Any = dist.group.WORLD._get_backend(device)  # type: ignore[union-attr]
    for wrong in (torch.int16, torch.complex64):
        with pytest.raises(RuntimeError, match="there is no message of type"):
            backend.send([torch.ones(2, dtype=wrong, device=device)], (rank + 1) % 3, 0)
    assert sim.violations() == [], sim.violations()
    return True


@pytest.mark.parametrize(("mode", "stuck"), [("lazy", False), ("eager", True)])
def test_messages_of_one_communicator_run_in_order(sim: SimPool, mode: Mode, stuck: bool) -> None:
    """Rank 1 receives from rank 2 first, which sends only when rank 1's message to rank 0 has come round."""
    found = sim.outcomes(3, mode, circle)
    if stuck:
        assert all(outcome.error == "RuntimeError" for outcome in found), [outcome.error for outcome in found]
        assert all("the simulated device hangs" in outcome.details for outcome in found)
    else:
        assert [outcome.value for outcome in found] == [True] * 3, [outcome.details for outcome in found]


def circle(device: torch.device) -> bool:
    sim, rank = loaded(), dist.get_rank()
    sim.set_hang_after(3.0)
    x, y = torch.full((4,), 1.0, device=device), torch.empty(4, device=device)
    for first, second in ((0, 1), (1, 2), (0, 2)):  # make the communicators, in one order
        if rank == first:
            dist.isend(x, second).wait()
        if rank == second:
            dist.irecv(y, first).wait()
    works: list[Any] = []
    if rank == 0:
        works = [dist.irecv(y, 1)]
        works[0].wait()
        works.append(dist.isend(y, 2))
    elif rank == 1:
        works = [dist.irecv(y, 2), dist.isend(x, 0)]
    else:
        received = dist.irecv(y, 0)
        received.wait()
        works = [dist.isend(y, 1)]
    for work in works:
        work.wait()
    assert y.tolist() == [1.0] * 4
    return True


def test_a_peer_that_is_gone_is_not_noticed_and_an_abort_ends_the_wait(sim: SimPool) -> None:
    assert sim.run(2, "lazy", left_alone) == [True, True]


def left_alone(device: torch.device) -> bool:
    sim, rank = loaded(), dist.get_rank()
    x = torch.ones(4, device=device)
    if rank == 0:
        dist.isend(x, 1).wait()
        return True
    dist.irecv(x, 0).wait()
    work = dist.irecv(x, 0)  # which rank 0 never sends
    time.sleep(0.3)
    assert not work.is_completed()
    backend: Any = dist.group.WORLD._get_backend(device)  # type: ignore[union-attr]
    backend.abort()
    work.wait()
    with pytest.raises(RuntimeError, match="was aborted"):
        x.tolist()
    assert sim.waits()
    return True
