"""Lines: every message arrives whole, in order and in its own step, or the line says why not."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock.comm import line as lines
from penstock.comm.distributed import DistributedTransport
from penstock.comm.line import LIMIT, Line, Switchboard
from penstock.comm.store import DistributedStore
from penstock.run import Schedule1F1B, ScheduleGPipe
from penstock.stage.stage import PipelineStage
from tests.gloo_pool import GlooPool

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.bool]


def switchboards(size: int) -> list[Switchboard]:
    store = dist.HashStore()
    return [Switchboard(rank, DistributedStore(store, rank, size)) for rank in range(size)]


def connected(*boards: Switchboard) -> None:
    """All lines between the switchboards, as after a step that went well."""
    everyone = range(len(boards))
    for board in boards:
        board.introduce(peer for peer in everyone if peer != board.rank)
    for board in boards:  # lower ranks ask first, so that one thread can do all
        board.connect(peer for peer in everyone if peer != board.rank)
        board.begin(1)


@contextmanager
def pair() -> Iterator[tuple[Line, Line]]:
    first, second = switchboards(2)
    connected(first, second)
    yield first.lines[1], second.lines[0]
    first.close()
    second.close()


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
            here.send(tensor)
        buffers = [torch.empty_like(tensor) for tensor in given_]
        arrivals = [there.expect(buffer) for buffer in buffers]
        order.shuffle(arrivals)  # type: ignore[attr-defined]
        for arrival in arrivals:
            arrival.wait(timedelta(seconds=5))
        assert all(map(same, given_, buffers))


def test_a_scalar_and_a_tensor_with_a_graph_are_sent(ends: tuple[Line, Line]) -> None:
    here, there = ends
    scalar, graph = torch.tensor(3.5), torch.ones(4, requires_grad=True) * 2
    here.send(scalar)
    here.send(graph)
    first, second = torch.empty(()), torch.empty(4)
    there.expect(first)
    there.expect(second).wait(timedelta(seconds=5))  # takes the one before, too
    assert first == 3.5
    assert second.tolist() == [2.0] * 4


def test_sending_never_blocks_and_takes_a_copy(ends: tuple[Line, Line]) -> None:
    here, there = ends
    count = 200  # 25 MB: more than any socket holds
    tensor = torch.empty(LIMIT // 8, dtype=torch.int64)
    for number in range(count):
        here.send(tensor.fill_(number))
    buffer = torch.empty_like(tensor)
    for number in range(count):
        there.expect(buffer).wait(timedelta(seconds=5))
        assert buffer.unique().tolist() == [number]
    here.send(tensor.fill_(7))  # the thread has sent all of it, and this one goes straight
    there.expect(buffer).wait(timedelta(seconds=5))
    assert buffer.unique().tolist() == [7]


def test_a_wait_is_bounded_and_ends_the_line_for_both(ends: tuple[Line, Line]) -> None:
    here, there = ends
    arrival = there.expect(torch.empty(1))
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="Timed out"):
        arrival.wait(timedelta(seconds=0.05))
    assert time.monotonic() - start < 2.0
    with pytest.raises(RuntimeError, match="Connection closed"):
        here.send(torch.ones(1))


def test_a_wait_without_a_bound_of_its_own_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_LONGEST", timedelta(seconds=0.05))
    with pair() as (_, there), pytest.raises(RuntimeError, match="Timed out"):
        there.expect(torch.empty(1)).wait()


@pytest.mark.parametrize("closer", ["peer", "own thread"])
def test_closing_ends_a_wait(ends: tuple[Line, Line], closer: str) -> None:
    here, there = ends
    threading.Timer(0.1, (here if closer == "peer" else there).close).start()
    with pytest.raises(RuntimeError, match="Connection closed"):
        there.expect(torch.empty(1)).wait(timedelta(seconds=20))


def test_a_forked_child_does_not_end_its_parents_line(ends: tuple[Line, Line]) -> None:
    here, there = ends
    child = os.fork()
    if child == 0:
        here.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    here.send(torch.ones(1))
    there.expect(torch.empty(1)).wait(timedelta(seconds=5))


def test_what_was_sent_before_closing_arrives(ends: tuple[Line, Line]) -> None:
    here, there = ends
    here.send(torch.ones(3))
    here.close()
    buffer = torch.empty(3)
    there.expect(buffer).wait(timedelta(seconds=5))
    assert buffer.tolist() == [1.0] * 3
    with pytest.raises(RuntimeError, match="Connection closed"):
        there.expect(buffer).wait(timedelta(seconds=5))


def test_a_message_of_another_step_is_refused(ends: tuple[Line, Line]) -> None:
    here, there = ends
    here.send(torch.ones(3))
    there.step = 2
    with pytest.raises(RuntimeError, match="message 1 of step 1 with 12 bytes, where message 1 of step 2"):
        there.expect(torch.empty(3)).wait(timedelta(seconds=5))


@pytest.mark.parametrize("size", [2, 4])
def test_a_message_of_another_size_is_refused(ends: tuple[Line, Line], size: int) -> None:
    here, there = ends
    here.send(torch.ones(3))
    with pytest.raises(RuntimeError, match=f"with 12 bytes, where message 1 of step 1 with {4 * size} bytes"):
        there.expect(torch.empty(size)).wait(timedelta(seconds=5))


def test_a_wait_that_ctrl_c_breaks_off_can_be_done_again(ends: tuple[Line, Line]) -> None:
    here, there = ends
    buffers = torch.empty(2), torch.empty(2)
    for buffer in buffers:
        there.expect(buffer)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            there.pull()
    finally:
        signal.signal(signal.SIGINT, before)
    for number in range(2):
        here.send(torch.full((2,), number + 1.0))
    there.settle()
    assert [buffer.tolist() for buffer in buffers] == [[1.0, 1.0], [2.0, 2.0]]


def test_a_message_that_arrived_as_ctrl_c_broke_in_is_not_waited_for_again(
    ends: tuple[Line, Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = ends
    for number in range(2):
        here.send(torch.full((2,), number + 1.0))
    receive = there._receive

    def interrupted(buffers: object) -> object:
        receive(buffers)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    first, second = torch.empty(2), torch.empty(2)
    arrival = there.expect(first)
    monkeypatch.setattr(there, "_receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        arrival.wait()
    monkeypatch.undo()
    there.expect(second).wait(timedelta(seconds=5))
    assert (first.tolist(), second.tolist()) == ([1.0, 1.0], [2.0, 2.0])


def test_every_pair_has_a_line_and_a_second_connect_keeps_it() -> None:
    boards = switchboards(3)
    connected(*boards)
    before = [dict(board.lines) for board in boards]
    assert [sorted(found) for found in before] == [[1, 2], [0, 2], [0, 1]]
    connected(*boards)
    assert [board.lines for board in boards] == before
    for board in boards:
        board.disconnect()
    connected(*boards)
    boards[0].lines[2].send(torch.ones(1))
    buffer = torch.empty(1)
    boards[2].lines[0].expect(buffer).wait(timedelta(seconds=5))
    assert buffer.item() == 1.0


def test_no_line_to_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    here = Switchboard(0, DistributedStore(store, 0, 2))
    monkeypatch.setattr(lines, "_HOST", "elsewhere")
    there = Switchboard(1, DistributedStore(store, 1, 2))
    monkeypatch.undo()
    here.introduce([1])
    here.connect([1])
    assert here.lines == there.lines == {}


def test_a_stranger_is_sent_away() -> None:
    first, second = switchboards(2)
    for board in (first, second):
        board.introduce([1 - board.rank])
    place = first._places[1]
    assert place is not None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(f"\0{place[0]}")
        stranger.send(lines._HELLO.pack(b"guess".ljust(32), 0, 1))
        first.connect([1])
        second.connect([0])
        first.begin(1)
        second.begin(1)
        stranger.settimeout(5.0)
        assert stranger.recv(1) == b""
    first.lines[1].send(torch.ones(1))
    second.lines[0].expect(torch.empty(1)).wait(timedelta(seconds=5))


def test_a_peer_that_never_asks_leaves_a_closed_line(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = switchboards(2)
    second.introduce([0])
    monkeypatch.setattr(lines, "_PATIENCE", 0.05)
    second.connect([0])
    with pytest.raises(RuntimeError, match="Connection closed"):
        second.lines[0].send(torch.ones(1))
    assert first.lines == {}


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
    return found, DistributedTransport.of().line(1 - rank) is not None


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
