"""Both transports keep the same promises: each test runs over threads, eager and rendezvous, and over gloo."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.comm import DistributedTransport, FailureRecord, LocalWorld, Transport
from penstock.errors import PeerFailed, RanksDisagree, RunError, StepTimeout
from tests.faults.fragile import SOON
from tests.gloo_pool import GlooPool

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo")]

Runner = Callable[..., list[Any]]
LATE = 0.6  # seconds, several times what a round trip takes on a busy machine


def over_gloo(function: Callable[..., Any], *args: Any) -> Any:
    return function(DistributedTransport.of(), *args)


@pytest.fixture(params=["threads", "threads, rendezvous", "threads, drawn order", "gloo"])
def run(request: pytest.FixtureRequest, gloo_pool: GlooPool) -> Runner:
    """run(num_ranks, function, *args): function(transport, *args) on every rank."""
    match request.param:
        case "gloo":
            return lambda num_ranks, function, *args: gloo_pool.run(num_ranks, over_gloo, function, *args)
        case "threads, rendezvous":
            return lambda num_ranks, *rest: LocalWorld(num_ranks, rendezvous=True).run(*rest)
        case "threads, drawn order":
            return lambda num_ranks, *rest: LocalWorld(num_ranks, seed=7).run(*rest)
        case _:
            return lambda num_ranks, *rest: LocalWorld(num_ranks).run(*rest)


def many_both_ways(transport: Transport, count: int) -> bool:
    peer = 1 - transport.rank
    send, receive, wait = transport.sender(peer), transport.receiver(peer), transport.waiter()
    # Sizes differ from message to message: one that overtakes another would not fit.
    buffers = [torch.empty(1 + number % 5, 3) for number in range(count)]
    tensors = [torch.full((1 + number % 5, 3), float(number + 1000 * transport.rank)) for number in range(count)]
    works = [receive([buffer]) for buffer in buffers] + [send([tensor]) for tensor in tensors]
    for work in works:
        wait(work)
    return all(bool((buffer == number + 1000 * peer).all()) for number, buffer in enumerate(buffers))


def test_messages_of_a_pair_arrive_in_order_with_many_in_flight(run: Runner) -> None:
    assert run(2, many_both_ways, 200) == [True, True]


def round_the_ring(transport: Transport, dtypes: list[torch.dtype]) -> list[float]:
    following, previous = (transport.rank + 1) % transport.num_ranks, (transport.rank - 1) % transport.num_ranks
    received = []
    for dtype in dtypes:
        value = torch.full((2,), transport.rank + 1, dtype=dtype)
        buffer = torch.zeros(2, dtype=dtype)
        works = [transport.irecv(buffer, previous), transport.isend(value, following)]
        for work in works:
            work.wait()
        received.append(float(buffer[1]))
    return received


def test_every_kind_of_number_goes_round_a_ring(run: Runner) -> None:
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
    assert run(3, round_the_ring, dtypes[:-1]) == [[3.0] * 6, [1.0] * 6, [2.0] * 6]
    assert run(3, round_the_ring, dtypes[-1:]) == [[1.0]] * 3


def odd_tensors(transport: Transport) -> list[list[int]]:
    """An empty tensor, a scalar, and the middle of a larger one."""
    base = torch.arange(12.0).reshape(4, 3)
    tensors = [torch.empty(0, 4), torch.tensor(5.0), base[1:3]]
    if transport.rank == 0:
        works = [transport.isend(tensor, 1) for tensor in tensors]
        buffers = tensors
    else:
        buffers = [torch.empty(0, 4), torch.tensor(0.0), torch.zeros(4, 3)[1:3]]
        works = [transport.irecv(buffer, 0) for buffer in buffers]
    for work in works:
        work.wait()
    return [buffer.flatten().int().tolist() for buffer in buffers]


def test_empty_scalar_and_offset_tensors_cross(run: Runner) -> None:
    assert run(2, odd_tensors) == [[[], [5], [3, 4, 5, 6, 7, 8]]] * 2


def not_contiguous(transport: Transport) -> str:
    if transport.rank == 0:
        with pytest.raises(RuntimeError) as caught:
            transport.isend(torch.zeros(3, 2).t(), 1)
        return str(caught.value)
    return ""


def test_a_tensor_that_is_not_contiguous_is_refused(run: Runner) -> None:
    assert "contiguous" in run(2, not_contiguous)[0]


def no_such_peer(transport: Transport) -> list[str]:
    texts = []
    for peer in (-1, transport.num_ranks, transport.rank):
        with pytest.raises(ValueError, match="has no peer") as caught:
            transport.sender(peer)
        texts.append(str(caught.value))
    return texts


def test_a_peer_that_does_not_exist_is_refused(run: Runner) -> None:
    assert run(2, no_such_peer)[1][1] == "rank 1 of 2 has no peer 2"


def collect(transport: Transport) -> tuple[list[bytes], list[bytes], list[float], float]:
    first = transport.collectives.all_bytes("numbers", bytes([transport.rank, 255, 0]))
    second = transport.collectives.all_bytes("nothing", b"")
    total = torch.tensor([1.0, float(transport.rank), float("nan") if transport.rank == 2 else 0.0])
    transport.collectives.reduce("the sum", total)
    loss = torch.tensor([0.25 if transport.rank == 1 else -1.0])
    transport.broadcast(loss, 1)
    return first, second, total.tolist()[:2], loss.item()


def test_gather_sum_and_broadcast_reach_every_rank(run: Runner) -> None:
    expected = ([bytes([rank, 255, 0]) for rank in range(4)], [b""] * 4, [4.0, 6.0], 0.25)
    assert run(4, collect) == [expected] * 4


def all_collectives(transport: Transport) -> list[Any]:
    ranks, mine = transport.collectives, transport.rank
    ranks.barrier("all are here")
    numbers = torch.tensor([mine, 3 - mine], dtype=torch.float64)
    ranks.reduce("the largest", numbers, "max")
    return [
        ranks.broadcast("a text", lambda: f"of rank {mine}"),
        ranks.gather("numbers", lambda: mine * 10),
        ranks.all_gather("long texts", "x" * 1000 * mine) == ["x" * 1000 * rank for rank in range(4)],
        ranks.together("each", lambda: mine, lambda: {"size": 4}),
        ranks.any(mine == 2),
        ranks.any(False),
        numbers.tolist(),
    ]


def test_collectives(run: Runner) -> None:
    for rank, found in enumerate(run(4, all_collectives)):
        gathered = [0, 10, 20, 30] if rank == 0 else None
        assert found == ["of rank 0", gathered, True, rank, True, False, [3.0, 3.0]]


def wrong_collectives(transport: Transport) -> list[str]:
    """On rank 2, or where it calls something else, every collective is wrong; the last one is right again."""
    ranks, wrong = transport.collectives, transport.rank == 2

    def fail() -> int:
        return 1 // 0 if wrong else 1

    calls: list[Callable[[], object]] = [
        lambda: ranks.together("work", fail),
        lambda: ranks.try_all("work", fail),
        lambda: ranks.gather("work", fail),
        lambda: ranks.all_gather("work", object() if wrong else 1),
        lambda: ranks.together("work", int, lambda: {"size": transport.rank}),
        lambda: ranks.barrier("save" if wrong else "load"),
        lambda: ranks.together("save", fail) if wrong else ranks.reduce("load", torch.zeros(3)),
        lambda: ranks.barrier("the end"),
    ]
    said = []
    for call in calls:
        try:
            call()
            said.append("")
        except RunError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_a_collective_that_is_wrong_on_one_rank_raises_on_all_and_the_next_one_works(run: Runner) -> None:
    for rank, (*failed, end) in enumerate(run(4, wrong_collectives)):
        for text in failed[:4]:
            assert text.startswith("RunError: work: " if rank == 2 else "RunError: rank 2 failed at work: "), text
        assert failed[4].startswith("RanksDisagree: the arguments of work differ between the ranks"), failed
        for text in failed[5:]:
            assert text.startswith("RanksDisagree: the ranks are about to run different things"), text
            assert {"save", "load"} < {*text.split()}
        assert end == ""


def through_the_store(transport: Transport) -> tuple[bytes, bool, int, bytes, bool]:
    store = transport.store
    if transport.rank == 0:
        store.set("here", b"\x00\xff")
    value = store.get("here", SOON)
    winner = store.first("winner", str(transport.rank).encode())
    store.add("count", 2)
    transport.collectives.all_bytes("all are here", b"")
    missing = store.check("nowhere")
    with pytest.raises(StepTimeout, match=r"(?s)nowhere.*rank  step  action"):
        store.get("nowhere", 0.2)
    return value, missing, store.add("count", 0), winner, store.first("winner", b"late") == winner


def test_the_store_keeps_bytes_counts_and_the_first_value(run: Runner) -> None:
    results = run(2, through_the_store)
    assert results[0][:3] == (b"\x00\xff", False, 4)
    assert results[0] == results[1]
    assert results[0][4]


def agree_twice(transport: Transport, counts: list[str]) -> list[str]:
    transport.collectives.same("train", {"schedule": "1F1B", "microbatches": "8"})
    with pytest.raises(RanksDisagree) as caught:
        transport.collectives.same("train", {"schedule": "1F1B", "microbatches": counts[transport.rank]})
    transport.collectives.same("train", {"schedule": "1F1B"})
    return str(caught.value).splitlines()


def test_ranks_that_disagree_all_raise_and_show_the_difference(run: Runner) -> None:
    results = run(3, agree_twice, ["8", "4", "8"])
    assert results[0] == results[1] == results[2]
    assert [line.split() for line in results[0][1:4]] == [["rank", "microbatches"], ["0,", "2", "8"], ["1", "4"]]


def different_things(transport: Transport) -> str:
    with pytest.raises(RanksDisagree) as caught:
        transport.collectives.same("train" if transport.rank else "evaluate", {})
    return str(caught.value)


def test_ranks_at_different_meetings_disagree_on_what_they_are_about_to_do(run: Runner) -> None:
    assert "evaluate" in run(2, different_things)[1]


def one_stays_away(transport: Transport) -> str:
    if transport.rank == 1:
        with suppress(StepTimeout):  # threads find out at once that all of them wait
            transport.store.get("over", SOON)
        return ""
    transport.timeout = 0.5
    with pytest.raises(StepTimeout) as caught:
        transport.collectives.same("train", {})
    transport.store.set("over", b"")
    return str(caught.value)


def test_a_rank_that_never_comes_to_an_agreement_is_named(run: Runner) -> None:
    told = run(2, one_stays_away)[0]
    assert "rank 1" in told
    assert told.count("rank  step  action") == 1, told


def hear_of_failure(transport: Transport) -> tuple[float, str, bool]:
    """Rank 1 fails in the first step and drains it; the others hear of it. The second step is clean."""
    transport.begin_step()
    ball = torch.zeros(1)
    peers = [1] if transport.rank != 1 else [0, 2]
    record, start = FailureRecord(1, stage=5, action="5F2", microbatch=2, cause="ValueError: no"), time.monotonic()
    if transport.rank == 1:
        transport.report_failure(record)
        assert transport.report_failure(FailureRecord(1, cause="a later one")) == record
    while transport.failed is None and transport.rank != 1:
        # A loop of messages, as a step is one; rank 1 drains along.
        assert time.monotonic() < start + SOON
        _exchange(transport, ball, peers, more=True)
    took = time.monotonic() - start
    if transport.rank == 1:
        _drain(transport, ball, peers)
    else:
        _exchange(transport, ball, peers, more=False)
    heard = "" if transport.failed is None else str(transport.failed.error())
    assert transport.failure() == record
    transport.end_step()
    transport.begin_step()
    clean = transport.failed is None and transport.failure() is None
    transport.end_step()
    return took, heard, clean


def _exchange(transport: Transport, ball: torch.Tensor, peers: list[int], *, more: bool) -> None:
    ball.fill_(float(more))
    for peer in peers:
        transport.isend(ball, peer).wait()
        if more:
            transport.irecv(ball, peer).wait()


def _drain(transport: Transport, ball: torch.Tensor, peers: list[int]) -> None:
    playing = set(peers)
    while playing:
        for peer in sorted(playing):
            transport.irecv(ball, peer).wait()
            if ball.item():
                time.sleep(0.002)
                transport.isend(ball, peer).wait()
            else:
                playing.remove(peer)


def test_a_failure_is_heard_by_all_within_seconds_and_the_next_step_is_clean(run: Runner) -> None:
    results = run(3, hear_of_failure)
    text = "rank 1 failed in action 5F2 (stage 5, microbatch 2): ValueError: no"
    assert [heard for _, heard, _ in results] == [text, "", text]
    assert all(clean for _, _, clean in results)
    assert all(took < SOON for took, _, _ in results)


def leave_early(transport: Transport) -> tuple[int, float]:
    """Rank 1 does one step and leaves; the others begin a second one."""
    transport.begin_step()
    transport.end_step()
    if transport.rank == 1:
        return 1, 0.0
    transport.begin_step()
    start = time.monotonic()
    try:
        with pytest.raises(PeerFailed) as caught:
            transport.irecv(torch.zeros(1), 1).wait()
    finally:
        transport.end_step()
    return caught.value.rank, time.monotonic() - start


def test_waiting_for_a_rank_that_has_left_names_it(run: Runner) -> None:
    results = run(3, leave_early)
    assert [rank for rank, _ in results] == [1, 1, 1]
    assert all(took < SOON for _, took in results)


def read_clock(transport: Transport) -> float:
    if transport.rank == 0:
        time.sleep(LATE)
    return transport.clock_offset()


def test_clocks_of_one_machine_agree_also_when_a_rank_is_late(run: Runner) -> None:
    offsets = run(3, read_clock)
    assert offsets[0] == 0.0
    assert max(map(abs, offsets)) < LATE / 4  # half of it, if the first answer counted


def in_a_wrapped_group() -> tuple[bool, float]:
    """As with TORCH_DISTRIBUTED_DEBUG=DETAIL, which puts the group's gloo into a backend that is none."""
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = dist.new_group([0, 1])
    finally:
        dist.set_debug_level(before)
    assert not isinstance(group._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
    transport = DistributedTransport.of(group)
    total = torch.tensor([transport.rank + 1.0])
    transport.begin_step()
    transport.collectives.reduce("the sum", total)
    transport.end_step()
    transport.close()
    return isinstance(transport._gloo, dist.ProcessGroupGloo), total.item()


def test_a_group_that_torch_watches_is_used_as_it_is_inside(gloo_pool: GlooPool) -> None:
    """Its messages had no lines, and its waits could not be ended."""
    assert gloo_pool.run(2, in_a_wrapped_group) == [(True, 3.0)] * 2
