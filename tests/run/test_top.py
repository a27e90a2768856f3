"""Where each rank is: `penstock top`, SIGUSR1 and the table in StepTimeout, on real processes of which one is slow."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import nn

import penstock
from penstock.cli.main import main
from penstock.errors import PenstockError, StepTimeout
from penstock.health.position import Whereabouts, table
from penstock.run.lookout import Position, read_folder
from penstock.train import run_report
from tests.faults.fragile import SOON, until
from tests.gloo_pool import GlooPool


class Slow(nn.Linear):
    """Does something in its second step: in the second forward, or in the third on the first of two ranks, which has then had an
    answer to its first."""

    steps = 0
    enough: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.enough is not None and self.steps == 7 - dist.get_rank():
            self.enough()
        return super().forward(x)


def make(folder: str | None, *, slow: int = 1, **options: Any) -> tuple[penstock.Pipeline, Slow]:
    rank = dist.get_rank()
    torch.manual_seed(0)  # all ranks draw the same batch
    module = Slow(4, 4)
    stage = penstock.PipelineStage(module, rank, dist.get_world_size(), "cpu")
    pipe = penstock.Pipeline(
        stages=[stage], schedule="1f1b", loss_fn=nn.functional.mse_loss, microbatches=4, run_folder=folder, **options
    )
    return pipe, module


def slowed(folder: str) -> str:
    """Rank 1 sits in the forward of its second microbatch until rank 0 has been seen to wait for it."""
    pipe, module = make(folder)
    x, y = torch.randn(2, 8, 4)
    pipe.step(x, target=y)
    seen: list[str] = []

    def watch() -> None:
        end = time.monotonic() + 30.0
        while time.monotonic() < end:
            text = read_folder(folder)
            rows = [line.split() for line in text.splitlines()[1:]]
            if rows[0][-2] != "0.0" and "waits for rank 1" in text and "1F1" in text:
                seen.append(text)
                return
            time.sleep(0.1)

    if pipe.rank == 1:
        module.enough = watch
    pipe.step(x, target=y)
    return seen[0] if seen else read_folder(folder)


@pytest.mark.processes
@pytest.mark.xdist_group("gloo")
def test_a_slow_rank_is_seen_from_outside(gloo_pool: GlooPool, tmp_path: Path) -> None:
    text = gloo_pool.run(2, slowed, str(tmp_path))[1]
    head, first, second = text.splitlines()
    assert head.split() == ["rank", "step", "action", "at", "does", "for"]
    assert "waits for rank 1" in first
    assert first.split()[1] == "2"
    assert second.split()[2] == "1F1"
    assert "computes (test_top.py:" in second, "where in the user's program it is"
    assert not list((tmp_path / "top").glob("rank-*.json")), "who leaves takes its file along"


def asked_by_signal(folder: str) -> str:
    """Rank 0 is in a wait, where no handler of Python's runs, when it is asked; what it writes to stderr comes back."""
    pipe, module = make(folder)
    x, y = torch.randn(2, 8, 4)
    pipe.step(x, target=y)
    log, kept = Path(folder) / f"stderr-{pipe.rank}", os.dup(2)
    if pipe.rank == 1:
        module.enough = lambda: pipe.transport.store.get("asked", SOON)
    else:

        def ask() -> None:
            until(lambda: "waits for rank 1" in (text := read_folder(folder)) and "1F1" in text)
            os.kill(os.getpid(), signal.SIGUSR1)
            until(lambda: "waits for rank 1" in log.read_text())
            pipe.transport.store.set("asked", b"")

        threading.Thread(target=ask).start()
    with log.open("w") as file:
        os.dup2(file.fileno(), 2)
        try:
            pipe.step(x, target=y)
        finally:
            os.dup2(kept, 2)
            os.close(kept)
    return log.read_text()


@pytest.mark.processes
@pytest.mark.xdist_group("gloo")
def test_a_signal_shows_the_table_even_in_a_wait(gloo_pool: GlooPool, tmp_path: Path) -> None:
    first, second = gloo_pool.run(2, asked_by_signal, str(tmp_path))
    assert first.count("waits for rank 1") == 1, first
    assert "1F1" in first
    assert second == ""


def late() -> str:
    pipe, module = make(None)
    x, y = torch.randn(2, 8, 4)
    pipe.step(x, target=y)
    store, program = pipe.transport.store, pipe.schedule._programs.get(0)

    def stay() -> None:
        store.set("rank 1 stays where it is", b"")
        until(lambda: pipe.transport.failed)

    def lose_patience() -> None:  # not before: on a busy machine rank 1 may come late to where it stays
        store.get("rank 1 stays where it is", SOON)
        pipe.transport.timeout = 1.0
        for channel in program.channels.values():
            channel.wait = pipe.transport.waiter()

    module.enough = stay if pipe.rank == 1 else lose_patience
    with pytest.raises(PenstockError) as caught:
        pipe.step(x, target=y)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.processes
@pytest.mark.xdist_group("gloo")
def test_a_timeout_says_where_everybody_was(gloo_pool: GlooPool) -> None:
    """Without any folder: the monitors of the others answer over their links."""
    first, second = gloo_pool.run(2, late)
    assert first.startswith("StepTimeout: rank 0 waited 1 s for a message of the step, rank 1\nrank  step"), first
    assert "waits for rank 1" in first
    assert "1F1" in first
    assert second.startswith("PeerFailed: rank 0 failed: StepTimeout: rank 0 waited 1 s"), second


def test_a_look_keeps_nothing_alive() -> None:
    """It asked the frames of the other thread for their names: what these referred to lived on, and once a frame was freed."""

    class Thing:
        pass

    entered, go, gone = threading.Event(), threading.Event(), []

    def work() -> None:
        thing = Thing()
        still = weakref.ref(thing)
        entered.set()
        go.wait(20.0)
        del thing
        gone.append(still() is None)

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait(20.0)
    position = Position(0)
    position.thread = thread.ident or 0
    try:
        found = position.look(3)
    finally:
        go.set()
        thread.join(20.0)
    assert (found.peer, found.place.partition(":")[0]) == (3, "test_top.py")
    assert gone == [True]


def test_threads_that_wait_for_one_another_are_shown() -> None:
    def stuck(transport: penstock.LocalTransport) -> None:
        if transport.rank == 0:
            transport.irecv(torch.zeros(1), 1).wait()
        else:
            transport.collectives.all_bytes("nothing", b"")

    with pytest.raises(StepTimeout, match=r"(?s)nothing is on its way.*rank  step.*has made no step yet"):
        penstock.LocalWorld(2).run(stuck)


@pytest.mark.parametrize("read", [read_folder, run_report.read])
def test_a_folder_that_cannot_be_read(read: Callable[[str], object]) -> None:
    with pytest.raises(PenstockError, match="cannot be read: File name too long"):
        read("x" * 5000)


def test_the_command(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["top", str(tmp_path)])
    assert result.exit_code == 1
    assert "has no running job" in result.output
    place = tmp_path / "top"
    place.mkdir()
    (place / "rank-1.json").write_bytes(Whereabouts(1, 7, "1F0", 3, 9, "waits", 0, 12.0).encode())
    result = CliRunner().invoke(main, ["top", str(tmp_path)])
    assert result.exit_code == 0
    assert "0     -     -       -       does not answer   -" in result.output
    assert "1     7     1F0     3 of 9  waits for rank 0  12.0 s" in result.output
    os.utime(place / "rank-1.json", (1.0, 1.0))
    assert "rank 1 has written nothing for" in CliRunner().invoke(main, ["top", str(tmp_path)]).output


def test_one_process_can_be_looked_at(tmp_path: Path) -> None:
    seen = []

    class Looking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            end = time.monotonic() + 20.0
            while "0F0" not in (text := read_folder(tmp_path)) and not seen and time.monotonic() < end:
                time.sleep(0.05)
            seen.append(text)
            return super().forward(x)

    stage = penstock.PipelineStage(Looking(4, 4), 0, 1, "cpu")
    pipe = penstock.Pipeline(
        stages=[stage], schedule="gpipe", loss_fn=nn.functional.mse_loss, microbatches=2, run_folder=tmp_path
    )
    pipe.step(*torch.randn(1, 4, 4), target=torch.randn(4, 4))
    assert "0F0" in seen[0]
    assert "computes" in seen[0]


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b'{"rank": "0"}', b'{"rank": 0, "more": 1}', b"[" * 99999, b"\xff"]
)
def test_what_is_no_whereabouts_is_refused(data: bytes) -> None:
    with pytest.raises(PenstockError, match="does not say where a rank is"):
        Whereabouts.decode(data)


def test_a_table_of_nobody() -> None:
    assert table([], num_ranks=1).splitlines()[1].split() == ["0", "-", "-", "-", "does", "not", "answer", "-"]
