"""Lines: every message arrives whole, in order and in its own step, or the line says why not."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock.comm import line as lines
from penstock.comm import switchboard as switching
from penstock.comm.distributed import DistributedTransport
from penstock.comm.line import LIMIT, Line
from penstock.comm.store import DistributedStore
from penstock.comm.switchboard import Switchboard
from penstock.run import Schedule1F1B, ScheduleGPipe
from penstock.stage.pipeline_stage import PipelineStage
from tests.faults.fragile import until
from tests.gloo_pool import GlooPool

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.bool]


class NoBackend:
    """What a line has beside its socket here: whatever goes that way is noted."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def __call__(self, tensors: list[Tensor]) -> NoBackend:
        self.sent += tensors
        return self

    def wait(self, timeout: timedelta | None = None, /) -> None:
        raise RuntimeError("nothing comes by the backend")


class Board(Switchboard):
    """A switchboard with a line to every other rank."""

    def __init__(self, rank: int, size: int, store: dist.Store) -> None:
        super().__init__(rank, DistributedStore(store, rank, size))
        self.peers = [peer for peer in range(size) if peer != rank]
        self.lines = {peer: self.line(peer, NoBackend(), NoBackend()) for peer in self.peers}


def switchboards(size: int) -> list[Board]:
    store = dist.HashStore()
    return [Board(rank, size, store) for rank in range(size)]


def connected(*boards: Board) -> None:
    """All lines between the switchboards get their sockets, as before the first step."""
    with ThreadPoolExecutor(len(boards)) as pool:
        list(pool.map(lambda board: board.connect(board.peers), boards))
    for board in boards:
        board.begin(1)


@contextmanager
def pair() -> Iterator[tuple[Line, Line]]:
    first, second = switchboards(2)
    connected(first, second)
    yield first.lines[1], second.lines[0]
    first.end(fine=False)
    second.end(fine=False)


@pytest.fixture
def ends() -> Iterator[tuple[Line, Line]]:
    with pair() as both:
        yield both


def same(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().tolist() == b.untyped_storage().tolist()


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=12),
    types=st.lists(st.sampled_from(DTYPES), min_size=12, max_size=12),
    order=st.randoms(),
)
def test_messages_arrive_in_order_whoever_waits_first(
    sizes: list[int], types: list[torch.dtype], order: object
) -> None:
    with pair() as (here, there):
        given_ = [
            torch.randint(0, 255, (size * kind.itemsize,), dtype=torch.uint8).view(kind)
            for size, kind in zip(sizes, types, strict=False)
        ]
        for tensor in given_:
            here.send([tensor])
        buffers = [torch.empty_like(tensor) for tensor in given_]
        arrivals = [there.receive([buffer]) for buffer in buffers]
        order.shuffle(arrivals)  # type: ignore[attr-defined]
        for arrival in arrivals:
            arrival.wait(timedelta(seconds=30))
        assert all(map(same, given_, buffers))


def test_a_scalar_and_a_tensor_with_a_graph_are_sent(ends: tuple[Line, Line]) -> None:
    here, there = ends
    scalar, graph = torch.tensor(3.5), torch.ones(4, requires_grad=True) * 2
    here.send([scalar])
    here.send([graph])
    first, second = torch.empty(()), torch.empty(4)
    there.receive([first])
    there.receive([second]).wait(timedelta(seconds=30))  # takes the one before, too
    assert first == 3.5
    assert second.tolist() == [2.0] * 4


def test_sending_never_blocks_and_takes_a_copy(ends: tuple[Line, Line]) -> None:
    here, there = ends
    count = 200  # 25 MB: more than any socket holds
    tensor = torch.empty(LIMIT // 8, dtype=torch.int64)
    for number in range(count):
        here.send([tensor.fill_(number)])
    buffer = torch.empty_like(tensor)
    for number in range(count):
        there.receive([buffer]).wait(timedelta(seconds=30))
        assert buffer.unique().tolist() == [number]
    here.send([tensor.fill_(7)])  # the thread has sent all of it, and this one goes straight
    there.receive([buffer]).wait(timedelta(seconds=30))
    assert buffer.unique().tolist() == [7]


def test_a_wait_is_bounded_and_ends_the_line_for_both(ends: tuple[Line, Line]) -> None:
    here, there = ends
    arrival = there.receive([torch.empty(1)])
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="Timed out"):
        arrival.wait(timedelta(seconds=0.05))
    assert time.monotonic() - start < 30.0
    with pytest.raises(RuntimeError, match="Connection closed"):
        here.send([torch.ones(1)])


def test_a_wait_without_a_bound_of_its_own_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_LONGEST", timedelta(seconds=0.05))
    with pair() as (_, there), pytest.raises(RuntimeError, match="Timed out"):
        there.receive([torch.empty(1)]).wait()


@pytest.mark.parametrize("closer", ["peer", "own thread"])
def test_closing_ends_a_wait(ends: tuple[Line, Line], closer: str) -> None:
    here, there = ends
    threading.Timer(0.1, (here if closer == "peer" else there).close).start()
    with pytest.raises(RuntimeError, match="Connection closed"):
        there.receive([torch.empty(1)]).wait(timedelta(seconds=20))


def test_a_forked_child_does_not_end_its_parents_line(ends: tuple[Line, Line]) -> None:
    here, there = ends
    child = os.fork()
    if child == 0:
        here.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    here.send([torch.ones(1)])
    there.receive([torch.empty(1)]).wait(timedelta(seconds=30))


def test_what_was_sent_before_closing_arrives(ends: tuple[Line, Line]) -> None:
    here, there = ends
    here.send([torch.ones(3)])
    here.close()
    buffer = torch.empty(3)
    there.receive([buffer]).wait(timedelta(seconds=30))
    assert buffer.tolist() == [1.0] * 3
    with pytest.raises(RuntimeError, match="Connection closed"):
        there.receive([buffer]).wait(timedelta(seconds=30))


def test_a_message_of_another_step_is_refused(ends: tuple[Line, Line]) -> None:
    here, there = ends
    here.send([torch.ones(3)])
    there.step = 2
    with pytest.raises(RuntimeError, match="message 1 of step 1 with 12 bytes, where message 1 of step 2"):
        there.receive([torch.empty(3)]).wait(timedelta(seconds=30))


@pytest.mark.parametrize("size", [2, 4])
def test_a_message_of_another_size_is_refused(ends: tuple[Line, Line], size: int) -> None:
    here, there = ends
    here.send([torch.ones(3)])
    with pytest.raises(RuntimeError, match=f"with 12 bytes, where message 1 of step 1 with {4 * size} bytes"):
        there.receive([torch.empty(size)]).wait(timedelta(seconds=30))


def test_ctrl_c_is_raised_when_the_message_is_there(ends: tuple[Line, Line]) -> None:
    here, there = ends
    buffers = torch.empty(2), torch.empty(2)
    arrivals = [there.receive([buffer]) for buffer in buffers]

    def interrupt() -> None:
        main = threading.main_thread().ident
        until(lambda: main is not None and sys._current_frames()[main].f_code is Line.pull.__code__)
        os.kill(os.getpid(), signal.SIGINT)
        for number in range(2):
            here.send([torch.full((2,), number + 1.0)])

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            arrivals[1].wait()
    finally:
        signal.signal(signal.SIGINT, before)
    assert [buffer.tolist() for buffer in buffers] == [[1.0, 1.0], [2.0, 2.0]]


def test_a_message_that_arrived_as_ctrl_c_broke_in_is_not_waited_for_again(
    ends: tuple[Line, Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = ends
    for number in range(2):
        here.send([torch.full((2,), number + 1.0)])
    receive = there._receive

    def interrupted(buffers: object) -> object:
        receive(buffers)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    first, second = torch.empty(2), torch.empty(2)
    arrival = there.receive([first])
    monkeypatch.setattr(there, "_receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        arrival.wait()
    monkeypatch.undo()
    there.receive([second]).wait(timedelta(seconds=30))
    assert (first.tolist(), second.tolist()) == ([1.0, 1.0], [2.0, 2.0])


def test_every_pair_has_a_socket_and_a_second_connect_keeps_it() -> None:
    boards = switchboards(3)
    connected(*boards)
    boards[0].lines[2].send([torch.ones(1)])
    connected(*boards)
    buffer = torch.empty(1)
    boards[2].lines[0].receive([buffer]).wait(timedelta(seconds=30))
    assert buffer.item() == 1.0
    for board in boards:
        board.close()


def test_after_a_step_that_failed_the_backend_is_used_until_one_goes_well() -> None:
    boards = switchboards(2)
    connected(*boards)
    boards[0].lines[1].send([torch.ones(1)])  # nobody takes it
    for board in boards:
        board.end(fine=False)
    buffer = torch.empty(1)
    assert isinstance(boards[0].lines[1].send([torch.ones(1)]), NoBackend)
    assert isinstance(boards[1].lines[0].receive([buffer]), NoBackend)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda board: board.end(fine=True), boards))
    assert boards[0].lines[1].send([torch.full((1,), 2.0)]) is None
    boards[1].lines[0].receive([buffer]).wait(timedelta(seconds=30))
    assert buffer.item() == 2.0
    for board in boards:
        board.close()


def test_a_large_message_goes_by_the_backend(ends: tuple[Line, Line]) -> None:
    here, there = ends
    large = torch.empty(LIMIT + 1, dtype=torch.uint8)
    assert isinstance(here.send([large]), NoBackend)
    assert isinstance(there.receive([large]), NoBackend)
    assert here.send([large[:LIMIT]]) is None


def test_no_socket_to_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    here = Board(0, 2, store)
    monkeypatch.setattr(switching, "_HOST", "elsewhere")
    Board(1, 2, store)
    monkeypatch.undo()
    here.connect([1])
    assert isinstance(here.lines[1].send([torch.ones(1)]), NoBackend)


def test_ranks_without_a_place_to_listen_stay_with_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switching, "_short_folder", lambda: "/nowhere/at/all")
    boards = switchboards(2)
    connected(*boards)
    assert isinstance(boards[0].lines[1].send([torch.ones(1)]), NoBackend)
    assert isinstance(boards[1].lines[0].receive([torch.ones(1)]), NoBackend)


def test_a_peer_that_never_asks_leaves_a_closed_line(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = switchboards(2)
    monkeypatch.setattr(switching, "_PATIENCE", 0.05)
    second.connect([0])
    with pytest.raises(RuntimeError, match="Connection closed"):
        second.lines[0].send([torch.ones(1)])
    assert isinstance(first.lines[1].send([torch.ones(1)]), NoBackend)
    second.end(fine=False)


class Mixed(nn.Module):
    """A boundary with a small tensor between two that are too large for a line."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, small: Tensor, *large: Tensor) -> tuple[Tensor, ...]:
        small = self.layer(small).tanh()
        wide = small.repeat(1, LIMIT // small.nbytes + 1) if not large else large[0] * 1.5
        return wide, small, wide.flip(0)

    def __call__(self, *args: Tensor) -> tuple[Tensor, ...]:
        if len(args) == 3:
            args = args[1], args[0] + args[2]
        return super().__call__(*args)  # type: ignore[no-any-return]


def loss_fn(output: tuple[Tensor, ...], target: Tensor) -> Tensor:
    return (output[1] - target).square().mean() + sum(part.square().mean() for part in output)


def train_mixed(name: str) -> tuple[list[list[Tensor]], bool]:
    """Gradients of the stage of this rank after each of three steps, and whether there was a line."""
    rank = dist.get_rank()
    module = Mixed(rank)
    schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[name](
        PipelineStage(module, rank, 2, "cpu"), 4, loss_fn=loss_fn
    )
    torch.manual_seed(7)
    found = []
    for _ in range(3):
        x, y = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
        schedule.step(x, target=y)
        found.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
    transport = DistributedTransport.of()
    sent_at_once = transport.sender(1 - rank)([torch.ones(1)]) is None
    transport.irecv(torch.empty(1), 1 - rank).wait()
    return found, sent_at_once


@pytest.mark.processes
@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_small_and_large_messages_of_one_boundary(gloo_pool: GlooPool, name: str) -> None:
    modules = [Mixed(0), Mixed(1)]
    torch.manual_seed(7)
    want: list[list[list[Tensor]]] = [[], []]
    for _ in range(3):
        x, y = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
        for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
            (loss_fn(modules[1](*modules[0](part)), target) / 4).backward()
        for module, found in zip(modules, want, strict=True):
            found.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
    for rank, (grads, line) in enumerate(gloo_pool.run(2, train_mixed, name)):
        assert line
        for step, (got, expected) in enumerate(zip(grads, want[rank], strict=True)):
            assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(got, expected, strict=True)), step
