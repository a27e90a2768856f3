"""Ranks as threads: one at a time, in a repeatable order, and never stuck."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

from penstock.comm import LocalTransport, LocalWorld
from penstock.errors import PeerFailed, RunError, ShapeError, StepTimeout


def both_receive_first(transport: LocalTransport) -> None:
    peer = 1 - transport.rank
    transport.irecv(torch.zeros(1), peer).wait()
    transport.isend(torch.zeros(1), peer).wait()


def test_a_deadlock_raises_on_every_rank_at_once_and_says_who_waits_for_what() -> None:
    world = LocalWorld(2)
    with pytest.raises(
        StepTimeout, match="rank 0 waits for message 0 from rank 1; rank 1 waits for message 0 from rank 0"
    ):
        world.run(both_receive_first)
    assert all(isinstance(error, StepTimeout) for error in world.errors)


def both_send_first(transport: LocalTransport) -> float:
    peer, buffer = 1 - transport.rank, torch.zeros(1)
    transport.isend(torch.ones(1), peer).wait()
    transport.irecv(buffer, peer).wait()
    return buffer.item()


def test_sends_that_wait_for_their_receives_deadlock_only_with_rendezvous() -> None:
    assert LocalWorld(2).run(both_send_first) == [1.0, 1.0]
    with pytest.raises(StepTimeout, match="rank 0 waits for rank 1 to receive message 0"):
        LocalWorld(2, rendezvous=True).run(both_send_first)


def overwrite_after_send(transport: LocalTransport) -> float:
    tensor = torch.ones(1)
    if transport.rank == 0:
        work = transport.isend(tensor, 1)
        tensor.fill_(9.0)
        work.wait()
    else:
        transport.irecv(tensor, 0).wait()
    return tensor.item()


def test_rendezvous_shows_a_buffer_that_is_written_while_it_is_sent() -> None:
    assert LocalWorld(2).run(overwrite_after_send) == [9.0, 1.0]
    assert LocalWorld(2, rendezvous=True).run(overwrite_after_send) == [9.0, 9.0]


def chain_that_breaks(transport: LocalTransport) -> None:
    if transport.rank == 2:
        raise KeyError("the culprit")
    transport.irecv(torch.zeros(1), transport.rank + 1).wait()


def test_the_first_exception_comes_out_and_those_who_waited_know_the_culprit() -> None:
    world = LocalWorld(3)
    with pytest.raises(KeyError, match="the culprit") as caught:
        world.run(chain_that_breaks)
    assert caught.value.__notes__ == ["raised on rank 2 of 3 (ranks as threads)"]
    first, second, _ = world.errors
    assert isinstance(first, PeerFailed)
    assert isinstance(second, PeerFailed)
    assert (first.rank, second.rank) == (2, 2)


@pytest.mark.parametrize(
    ("sent", "awaited"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(4), torch.zeros(5)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
    ],
)
@pytest.mark.parametrize("rendezvous", [False, True])
def test_a_message_that_does_not_fit_names_both_sides(
    sent: torch.Tensor, awaited: torch.Tensor, rendezvous: bool
) -> None:
    def mismatch(transport: LocalTransport) -> None:
        post = transport.irecv(awaited, 0) if transport.rank else transport.isend(sent, 1)
        post.wait()

    with pytest.raises(ShapeError) as caught:
        LocalWorld(2, rendezvous=rendezvous).run(mismatch)
    for word, tensor in (("sent", sent), ("awaited", awaited)):
        assert f"{word} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" in str(caught.value)


def test_a_message_that_nobody_receives_is_an_error() -> None:
    def forgetful(transport: LocalTransport) -> None:
        if transport.rank == 0:
            transport.isend(torch.zeros(1), 1).wait()

    world = LocalWorld(2)
    with pytest.raises(RunError, match="1 sent from rank 0 to rank 1"):
        world.run(forgetful)
    assert world.run(both_send_first) == [1.0, 1.0], "what was left over is gone"


def trace(transport: LocalTransport, events: list[int]) -> None:
    buffer = torch.zeros(1)
    for _ in range(5):
        events.append(transport.rank)
        works = [transport.irecv(buffer, (transport.rank - 1) % 3), transport.isend(buffer, (transport.rank + 1) % 3)]
        for work in works:
            work.wait()


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_the_order_of_the_ranks_is_the_same_every_time(seed: int | None) -> None:
    orders = []
    for _ in range(3):
        events: list[int] = []
        LocalWorld(3, seed=seed, rendezvous=True).run(trace, events)
        orders.append(events)
    assert orders[0] == orders[1] == orders[2]


def test_another_seed_gives_another_order() -> None:
    orders = set()
    for seed in range(5):
        events: list[int] = []
        LocalWorld(3, seed=seed).run(trace, events)
        orders.add(tuple(events))
    assert len(orders) > 1


def test_one_rank_runs_at_a_time() -> None:
    running = 0

    def busy(transport: LocalTransport) -> None:
        nonlocal running
        for _ in range(20):
            running += 1
            torch.ones(50, 50) @ torch.ones(50, 50)
            assert running == 1
            running -= 1
            trace_once(transport)

    def trace_once(transport: LocalTransport) -> None:
        transport.collectives.all_bytes("all", b"")

    LocalWorld(4).run(busy)


def test_no_thread_stays_behind() -> None:
    before = set(threading.enumerate())
    world = LocalWorld(4)
    world.run(lambda transport: transport.collectives.all_bytes("all", b""))
    with pytest.raises(StepTimeout):
        LocalWorld(2).run(both_receive_first)
    assert set(threading.enumerate()) <= before  # one of another test may have ended meanwhile


def test_the_ranks_take_over_the_callers_grad_mode() -> None:
    world = LocalWorld(2)
    assert world.run(lambda transport: torch.is_grad_enabled()) == [True, True]
    with torch.no_grad():
        assert world.run(lambda transport: torch.is_grad_enabled()) == [False, False]


def test_autograd_does_not_see_a_receive() -> None:
    def receive_into_a_leaf(transport: LocalTransport) -> tuple[bool, int]:
        tensor = torch.ones(2, requires_grad=True)
        post = transport.irecv(tensor, 0) if transport.rank else transport.isend(tensor * 2, 1)
        post.wait()
        return tensor.is_leaf, tensor._version

    assert LocalWorld(2).run(receive_into_a_leaf) == [(True, 0), (True, 0)]


def test_a_fault_can_be_put_into_the_nth_message() -> None:
    def fail_at_third(source: int, destination: int, number: int) -> None:
        if (source, destination, number) == (1, 0, 2):
            raise OSError("cable cut")

    with pytest.raises(OSError, match="cable cut"):
        LocalWorld(2, on_message=fail_at_third).run(lambda transport: [both_send_first(transport) for _ in range(4)])


def test_a_message_can_be_late_without_being_lost_or_overtaken() -> None:
    asked = []

    def hold(source: int, destination: int, number: int) -> bool:
        asked.append((source, destination, number))
        return source == 0 and number == 0

    def numbered(transport: LocalTransport) -> list[float]:
        buffers = [torch.tensor([float(number)]) for number in range(3)]
        works = [transport.irecv(b, 0) if transport.rank else transport.isend(b, 1) for b in buffers]
        for work in works:
            work.wait()
        return [buffer.item() for buffer in buffers]

    assert LocalWorld(2, on_message=hold).run(numbered)[1] == [0.0, 1.0, 2.0]
    assert asked == [(0, 1, 0), (0, 1, 1), (0, 1, 2)]


def test_a_world_runs_again_after_a_failure_with_its_counts_level() -> None:
    def lopsided(transport: LocalTransport) -> None:
        if transport.rank == 0:
            transport.begin_step()
            raise ValueError("early")
        transport.collectives.same("train", {})

    def healthy(transport: LocalTransport) -> int:
        epoch = transport.begin_step()
        transport.collectives.same("train", {})
        transport.end_step()
        return epoch

    world = LocalWorld(2)
    with pytest.raises(ValueError, match="early"):
        world.run(lopsided)
    assert world.run(healthy) == [2, 2]


def test_an_interrupted_caller_stops_the_ranks() -> None:
    def interrupt(transport: LocalTransport) -> None:
        if transport.rank == 0:
            raise KeyboardInterrupt
        transport.irecv(torch.zeros(1), 0).wait()

    world = LocalWorld(2)
    with pytest.raises(KeyboardInterrupt):
        world.run(interrupt)
    assert isinstance(world.errors[1], PeerFailed)


def test_a_world_needs_a_rank() -> None:
    with pytest.raises(ValueError, match="at least 1 rank, not 0"):
        LocalWorld(0)


def test_a_caller_interrupted_from_outside_gets_its_exception_and_no_thread_stays() -> None:
    before = set(threading.enumerate())
    stop = threading.Event()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored

    def endless(transport: LocalTransport) -> None:
        if transport.rank == 0:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        while not stop.is_set():
            transport.collectives.all_bytes("again", b"")

    world = LocalWorld(2)
    try:
        with pytest.raises(KeyboardInterrupt):
            world.run(endless)
    finally:
        signal.signal(signal.SIGINT, handler)
    stop.set()
    assert {thread for thread in threading.enumerate() if thread.name.startswith("rank ")} <= before
