"""The strict process group keeps the rules of ProcessGroupNCCL, also where they hurt."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from penstock.comm import DistributedTransport, accelerator
from penstock.comm.communicators import Maker, all_at_once
from penstock.plan.check_communicators import QueueLayout
from tests.accelerator.pool import BOUND, Mode, SimPool
from tests.accelerator.test_device import held, loaded
from tests.gloo_pool import free_port


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
    assert {text.split(" from")[0].split(" to")[0] for text in sim.waits()} == {"the first message"}, sim.waits()
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
    backend = strict(device)
    for wrong in (torch.int16, torch.complex64):
        with pytest.raises(RuntimeError, match="there is no message of type"):
            backend.send([torch.ones(2, dtype=wrong, device=device)], (rank + 1) % 3, 0)
    assert sim.violations() == [], sim.violations()
    return True


@pytest.mark.parametrize(("mode", "stuck"), [("lazy", False), ("eager", True)])
def test_messages_of_one_communicator_run_in_order(sim: SimPool, mode: Mode, stuck: bool) -> None:
    """Rank 1 receives from rank 2 first, which sends only when rank 1's message to rank 0 has come round."""
    found = sim.outcomes(3, mode, circle, 3.0 if stuck else BOUND / 2)
    if stuck:
        assert all(outcome.error == "RuntimeError" for outcome in found), [outcome.error for outcome in found]
        assert all("the simulated device hangs" in outcome.details for outcome in found)
    else:
        assert [outcome.value for outcome in found] == [True] * 3, [outcome.details for outcome in found]


def circle(device: torch.device, hangs_after: float) -> bool:
    sim, rank = loaded(), dist.get_rank()
    sim.set_hang_after(hangs_after)
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
        torch.accelerator.synchronize()
        return True
    dist.irecv(x, 0).wait()
    torch.accelerator.synchronize()  # an abort now would leave rank 0 in its send for ever
    work = dist.irecv(x, 0)  # which rank 0 never sends
    time.sleep(0.3)
    assert not work.is_completed()
    strict(device).abort()
    work.wait()
    with pytest.raises(RuntimeError, match="was aborted"):
        x.tolist()
    assert sim.waits()
    return True


def strict(device: torch.device) -> Any:
    """The backend of the user's group."""
    return dist.group.WORLD._get_backend(device)  # type: ignore[union-attr]


def test_the_first_message_in_a_direction_makes_the_host_wait_for_the_other_side(sim: SimPool) -> None:
    assert sim.run(2, "eager", first_and_second) == [True] * 2


def first_and_second(device: torch.device) -> bool:
    """Rank 1 posts the first receive when it has said so, the second one when rank 0 has gone on."""
    store, x = _get_default_store(), torch.ones(4, device=device)
    if dist.get_rank() == 0:
        dist.isend(x, 1).wait()
        assert store.check(["about to post"])
        dist.isend(x, 1).wait()
        store.set("gone on", "")
    else:
        time.sleep(0.3)
        store.set("about to post", "")
        dist.irecv(x, 0).wait()
        store.wait(["gone on"])
        dist.irecv(x, 0).wait()
    torch.accelerator.synchronize()
    return True


def test_communicators_are_aborted_all_at_once(sim: SimPool) -> None:
    """To abort one waits for the device, and so for the other, whose message never comes."""
    assert sim.run(2, "lazy", aborts) == [True] * 2


def aborts(device: torch.device) -> bool:
    maker = Maker("strict", strict(device), timedelta(seconds=20))
    rank, x = dist.get_rank(), torch.ones(4, device=device)
    made = [maker.make(name, PrefixStore(name, _get_default_store()), rank=rank, ranks=[0, 1]) for name in "ab"]
    for each in made:
        (each.send if rank == 0 else each.recv)([x], 1 - rank, 0).wait()
    torch.accelerator.synchronize()  # else an abort might come before the message, and rank 0 wait in its send for ever
    if rank == 0:
        return True
    works = [each.recv([torch.empty_like(x)], 0, 0) for each in made]
    loaded().set_hang_after(1.0)
    with pytest.raises(RuntimeError, match="an abort waited for the device"):
        made[0].abort()
    assert not works[1].is_completed()
    all_at_once([each.abort for each in made], bound=5.0)
    assert works[1].is_completed()
    with pytest.raises(RuntimeError, match="was aborted"):
        torch.accelerator.synchronize()
    return True


def test_communicators_are_like_the_users_group(sim: SimPool) -> None:
    assert sim.run(2, "lazy", alike, free_port()) == [True] * 2


def alike(device: torch.device, port: int) -> bool:
    """Timeout and options are the group's; an error does not end the process, unless the user says that it shall."""
    rank, options = dist.get_rank(), loaded().StrictGroup.Options()
    options.is_high_priority_stream, options.config.min_ctas = True, 3
    bound = timedelta(seconds=117)
    dist.destroy_process_group()
    dist.init_process_group(
        "strict", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=bound, pg_options=options
    )
    transport: Any = DistributedTransport.of(device=device)
    transport.connect([1 - rank])
    made = transport._communicators()
    assert len(made) == 2
    for each in made:
        assert (each.options._timeout, each.options.is_high_priority_stream) == (bound, True)
        assert each.options.config.min_ctas == 3
    assert [each.error_handling for each in (strict(device), *made)] == [3, 2, 2]
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"
    try:
        again = Maker("strict", strict(device), bound).make(
            "again", PrefixStore("again", _get_default_store()), rank=rank, ranks=[0, 1]
        )
        assert again.error_handling == 1
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    finally:
        del os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]
    transport.close()
    for each in made:  # nothing is left to be told of by torch when the program ends
        with pytest.raises(RuntimeError, match="make a new one"):
            each.send([torch.ones(1, device=device)], 1 - rank, 0)
    return True


def test_who_leaves_lets_its_device_finish_and_ends_what_never_will(sim: SimPool) -> None:
    assert sim.run(2, "lazy", leaves) == [True] * 2


def leaves(device: torch.device) -> bool:
    """Rank 0 leaves when its message is not taken yet; it would wait for a moment only if something had gone wrong."""
    transport: Any = DistributedTransport.of(device=device)
    rank, store, x = transport.rank, _get_default_store(), torch.ones(4, device=device)
    transport.connect([1 - rank])
    torch.accelerator.synchronize()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerator, "_FAREWELL", 0.05)
        patch.setattr(accelerator, "_ABORT", 60.0)
        if rank == 0:
            transport.isend(x, 1).wait()
            store.set("about to leave", "")
            transport.close()
            assert torch.accelerator.current_stream().query()
            assert transport._aborted is False
        else:
            with held():
                store.wait(["about to leave"])
                y = torch.empty_like(x)
                transport.irecv(y, 0).wait()
            assert y.tolist() == [1.0] * 4
            transport.irecv(y, 0).wait()  # which rank 0 never sends
            transport.close()
            with pytest.raises(RuntimeError, match="was aborted"):
                torch.accelerator.synchronize()
        for each in transport._communicators():  # nothing is left to be told of by torch when the program ends
            with pytest.raises(RuntimeError, match="make a new one"):
                each.send([x], 1 - rank, 0)
    return True


@pytest.mark.parametrize("queues", ["direction", "pair", "one"])
def test_nobody_waits_for_the_first_message_of_a_step(sim: SimPool, queues: QueueLayout) -> None:
    assert sim.run(3, "lazy", connected, queues) == [[]] * 3


def connected(device: torch.device, queues: QueueLayout) -> list[str]:
    """What made the host wait when messages went to and fro in a chain, after it was connected."""
    transport: Any = DistributedTransport.of(device=torch.device(device.type))  # whose number is found
    assert transport.device == device
    transport.arrange(queues)
    rank = transport.rank
    neighbours = [peer for peer in (rank - 1, rank + 1) if 0 <= peer < 3]
    transport.connect(neighbours)
    torch.accelerator.synchronize()
    loaded().reset()
    x, y = torch.ones(4, device=device), torch.empty(4, device=device)
    for sender, receiver in ((0, 1), (1, 2), (2, 1), (1, 0)):
        if rank == sender:
            transport.sender(receiver)([x])
        if rank == receiver:
            transport.receiver(sender)([y]).wait()
    return list(loaded().waits())
