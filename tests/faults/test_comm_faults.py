"""What happens to the others when a process is killed, interrupted, leaves or is late: they are told who, and soon."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from penstock.comm import DistributedTransport, FailureRecord
from penstock.errors import PeerFailed, StepTimeout, TransportError
from tests.faults.fragile import SOON, until
from tests.gloo_pool import GlooPool

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo")]


def killed_peer(direction: str) -> tuple[int, str, float]:
    """Rank 1 is killed while 0 waits for it, and 2 waits for 0; 0 leaves as soon as it knows."""
    transport = DistributedTransport.of()
    transport.begin_step()
    transport.collectives.all_bytes("all are here", b"")
    start = time.monotonic()
    if transport.rank == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    peer = 1 if transport.rank == 0 else 0
    post = transport.irecv if direction == "receive" else transport.isend
    with pytest.raises(PeerFailed) as caught:
        post(torch.zeros(4), peer).wait()
    transport.end_step()
    return caught.value.rank, caught.value.cause, time.monotonic() - start


@pytest.mark.parametrize(("direction", "store"), [("receive", "tcp"), ("send", "file")])
def test_a_killed_process_is_named_on_every_rank(gloo_pool: GlooPool, direction: str, store: str) -> None:
    first, second, third = gloo_pool.outcomes(3, killed_peer, direction, store=store)
    assert second.exit_code == -signal.SIGKILL
    for outcome in (first, third):
        assert outcome.ok, outcome.details
        rank, cause, seconds = outcome.value
        assert (rank, seconds < SOON) == (1, True)
        assert cause == "its process has ended" or "connection lost" in cause


def killed_holder_of_the_store() -> tuple[int, float]:
    transport = DistributedTransport.of()
    transport.begin_step()
    transport.collectives.all_bytes("all are here", b"")
    start = time.monotonic()
    if transport.rank == 0:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerFailed) as caught:
        transport.irecv(torch.zeros(4), 0).wait()
    time.sleep(0.7)  # the watcher looks at a store that is gone
    transport.end_step()
    return caught.value.rank, time.monotonic() - start


def test_the_store_may_die_with_its_process(gloo_pool: GlooPool) -> None:
    first, second = gloo_pool.outcomes(2, killed_holder_of_the_store, store="tcp")
    assert first.exit_code == -signal.SIGKILL
    assert second.ok, second.details
    rank, seconds = second.value
    assert (rank, seconds < SOON) == (0, True)


def late_peer() -> tuple[str, str, float]:
    transport = DistributedTransport.of()
    transport.timeout = 0.5
    transport.begin_step()
    transport.collectives.all_bytes("all are here", b"")
    start = time.monotonic()
    if transport.rank == 1:
        until(lambda: transport.failed)
        kinds: tuple[type[Exception], ...] = (PeerFailed,)
    else:
        kinds = (StepTimeout,)
    with pytest.raises(kinds) as caught:
        transport.irecv(torch.zeros(4), 1 - transport.rank).wait()
    with pytest.raises((TransportError, PeerFailed)) as after:
        transport.isend(torch.zeros(4), 1 - transport.rank).wait()
    transport.end_step()
    return str(caught.value), str(after.value), time.monotonic() - start


def test_a_wait_that_runs_out_says_who_waited_for_what_and_the_late_rank_hears_why(gloo_pool: GlooPool) -> None:
    (waited, closed, seconds), (told, _, _) = gloo_pool.run(2, late_peer)
    assert waited.startswith("rank 0 waited 0.5 s for a receive of float32[4], rank 1\nrank  step"), (
        "and where all were"
    )
    assert "make a new process group" in closed
    assert seconds < SOON
    assert told.startswith("rank 0 failed: StepTimeout: rank 0 waited 0.5 s")


def default_bound() -> float:
    return DistributedTransport.of().timeout


def test_the_bound_is_that_of_the_process_group(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(2, default_bound, group_timeout=77.0) == [77.0, 77.0]


def interrupted(drains: bool) -> tuple[str, float]:
    """Rank 0 sits in a receive when Ctrl-C comes; rank 1 hears of it and, if it drains, ends that receive."""
    transport = DistributedTransport.of()
    transport.begin_step()
    transport.collectives.all_bytes("all are here", b"")
    start = time.monotonic()
    if transport.rank == 0:
        process = os.getpid()

        def interrupt() -> None:
            until(lambda: transport.awaited == 1)
            os.kill(process, signal.SIGINT)
            if not drains:
                until(lambda: transport.store.check("heard"))
                os.kill(process, signal.SIGINT)

        threading.Thread(target=interrupt).start()
        try:
            transport.irecv(torch.zeros(1), 1).wait()
        except KeyboardInterrupt as error:
            transport.end_step()
            transport.store.set("over", b"")
            return type(error).__name__, time.monotonic() - start
        return "nothing", 0.0
    until(lambda: transport.failed)
    heard = "" if transport.failed is None else str(transport.failed.error())
    if drains:
        transport.isend(torch.zeros(1), 0).wait()
    else:
        transport.store.set("heard", b"")
        transport.store.get("over", SOON)
    transport.end_step()
    return heard, time.monotonic() - start


@pytest.mark.parametrize("drains", [True, False], ids=["peer drains", "second Ctrl-C"])
def test_ctrl_c_ends_a_wait(gloo_pool: GlooPool, drains: bool) -> None:
    (kind, seconds), (heard, _) = gloo_pool.run(2, interrupted, drains)
    assert kind == "KeyboardInterrupt"
    assert seconds < SOON
    assert heard == "rank 0 failed: KeyboardInterrupt: interrupted by SIGINT"


def own_handler() -> tuple[bool, bool]:
    """A program that handles SIGINT itself, to stop after the step, is left alone."""
    transport = DistributedTransport.of()
    caught: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    wakeup = signal.set_wakeup_fd(-1)
    try:
        transport.begin_step()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        failed = transport.failure() is not None
        transport.end_step()
        restored = signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(signal.SIGINT, before)
        signal.set_wakeup_fd(wakeup)
    return bool(caught) and not failed, restored


def test_a_programs_own_handler_of_ctrl_c_is_respected(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(2, own_handler) == [(True, True)] * 2


def closes_but_lives() -> tuple[int, str, float]:
    """Rank 1 leaves the training loop and its process goes on: no connection is lost, and nobody drains."""
    transport = DistributedTransport.of()
    transport.begin_step()
    transport.end_step()
    start = time.monotonic()
    if transport.rank == 1:
        transport.close()
        transport.store.get("over", SOON)
        return 1, "", 0.0
    transport.begin_step()
    with pytest.raises(PeerFailed) as caught:
        transport.irecv(torch.zeros(1), 1).wait()
    transport.end_step()
    transport.store.set("over", b"")
    return caught.value.rank, caught.value.cause, time.monotonic() - start


def test_a_rank_that_leaves_while_its_process_lives_on_is_named(gloo_pool: GlooPool) -> None:
    rank, cause, seconds = gloo_pool.run(2, closes_but_lives)[0]
    assert (rank, seconds < SOON) == (1, True)
    assert cause == "it left after step 1"


def parted_ways(*, ends: bool) -> tuple[str, float]:
    """Rank 1 has run out of data and goes on to another schedule, with an agreement; rank 0 is in its next step."""
    transport = DistributedTransport.of()
    transport.begin_step()
    transport.end_step()
    start = time.monotonic()
    if transport.rank == 1:
        with pytest.raises(PeerFailed) as caught:
            transport.collectives.same("evaluate", {})
        if ends:  # and its process with it: that it left is not what rank 0 has to know
            transport.close()
            transport.break_connections(FailureRecord(1, cause="its process ends"))
    else:
        transport.begin_step()
        with pytest.raises(PeerFailed) as caught:
            transport.irecv(torch.zeros(1), 1).wait()
        transport.end_step()
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize("ends", [False, True], ids=["goes on", "ends"])
def test_ranks_that_part_ways_between_steps_are_both_told(gloo_pool: GlooPool, ends: bool) -> None:
    (first, waited), (second, _) = gloo_pool.run(2, partial(parted_ways, ends=ends))
    assert first == "rank 1 failed: after step 1 it went to 'evaluate'"
    assert second == "rank 0 failed: it is in step 2 instead of 'evaluate'"
    assert waited < SOON


def finishes_first() -> bool:
    """Leaving after the last step must not disturb ranks that are still in it."""
    transport = DistributedTransport.of()
    transport.begin_step()
    if transport.rank == 0:
        transport.isend(torch.zeros(1), 1).wait()
        transport.end_step()
        transport.close()
        time.sleep(1.5)
        return True
    time.sleep(1.0)
    transport.irecv(torch.zeros(1), 0).wait()
    undisturbed = transport.failed is None
    transport.end_step()
    return undisturbed


def test_a_rank_that_finishes_first_disturbs_nobody(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(2, finishes_first) == [True, True]


def replicas() -> tuple[list[int], str | None, bool]:
    """Two pipelines side by side, as with data parallelism: what one posts, the other never sees."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    transport = DistributedTransport.of(mesh.get_group("pp"))
    pipeline = dist.get_rank() // 2
    members = [int(post) for post in transport.collectives.all_bytes("ranks", str(dist.get_rank()).encode())]
    transport.begin_step()
    if dist.get_rank() == 2:
        transport.report_failure(FailureRecord(transport.rank, cause="only here"))
    transport.collectives.all_bytes("posted", b"")
    buffer = torch.zeros(1)
    peer = 1 - transport.rank
    works = [transport.irecv(buffer, peer), transport.isend(torch.tensor([float(dist.get_rank())]), peer)]
    for work in works:
        work.wait()
    failure = transport.failure()
    dist.barrier()
    transport.end_step()
    return members, failure and failure.cause, buffer.item() == 2 * pipeline + peer


def test_pipelines_side_by_side_do_not_meet(gloo_pool: GlooPool) -> None:
    results = gloo_pool.run(4, replicas)
    assert results == [([0, 1], None, True)] * 2 + [([2, 3], "only here", True)] * 2


def lives() -> tuple[bool, bool, int]:
    """One transport for a group, and a fresh one, without old news, for a group that was made again."""
    first = DistributedTransport.of()
    same = DistributedTransport.of(dist.group.WORLD) is first
    first.begin_step()
    first.report_failure(FailureRecord(first.rank, cause="old news"))
    first.end_step()
    again = DistributedTransport()
    again.begin_step()
    clean = again.failure() is None
    again.end_step()
    return same, clean, again.epoch


def test_a_transport_made_again_has_no_old_news(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(2, lives) == [(True, True, 1)] * 2


def test_without_a_process_group_it_says_what_to_call() -> None:
    with pytest.raises(TransportError, match="init_process_group first"):
        DistributedTransport()
