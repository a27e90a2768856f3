"""Real processes with a gloo process group, started once and used by many tests.

    pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo")]

    def exchange(scale):                      # module level: it is named to the workers, not sent
        rank = torch.distributed.get_rank()
        ...

    def test_exchange(gloo_pool):
        assert gloo_pool.run(2, exchange, 3.0) == [...]

Each call gets a fresh process group in the same processes. A worker that dies or hangs is replaced at the next call;
``outcomes`` tells what became of each rank. Nothing here imports torch, the workers do.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import secrets
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

_STARTUP = 90.0  # seconds for processes to start and import torch on a busy machine
_AFTERMATH = 60.0  # seconds that ranks may live on after another one raised or died
_PARTING = 5.0  # seconds in which workers that are no longer needed may end by themselves


@dataclass(frozen=True)
class Job:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    world_size: int
    meeting_point: str
    group_timeout: float


@dataclass(frozen=True)
class Outcome:
    """What became of one rank: a value, or the kind of the exception and its traceback, or an exit code."""

    rank: int
    value: Any = None
    error: str | None = None
    details: str = ""
    exit_code: int | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.error is None


class RemoteError(Exception):
    """A rank raised, died or hung; the text holds the tracebacks, the first failure first."""


class GlooPool:
    """Worker processes that wait for functions to run as ranks of a gloo process group."""

    def __init__(self, *, preload: Sequence[str] = ()) -> None:
        """``preload``: modules that a process has imported from which the workers are then forked, so that they start at once.

        Without it each worker is a process of its own from the beginning, with its own order of sets.
        """
        self._context: Any = multiprocessing.get_context("forkserver" if preload else "spawn")
        if preload:
            self._context.set_forkserver_preload(list(preload))
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._directory = tempfile.TemporaryDirectory(prefix="penstock-pool-")
        self._calls = 0

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Call ``function(*args)`` in ``world_size`` ranks; their results in order, or RemoteError."""
        outcomes = self.outcomes(world_size, function, *args, **options)
        failed = sorted((outcome for outcome in outcomes if not outcome.ok), key=lambda outcome: outcome.seconds)
        if failed:
            parts = [f"rank {outcome.rank}: {outcome.error}\n{outcome.details}" for outcome in failed]
            raise RemoteError("\n".join(parts))
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 90.0,
        group_timeout: float = 1800.0,
        store: str = "file",
    ) -> list[Outcome]:
        """The same, telling for each rank what became of it. ``store``: "file", or "tcp" (held by rank 0)."""
        try:
            self._grow(world_size)
            self._calls += 1
            place = f"file://{self._directory.name}/{self._calls}"
            point = place if store == "file" else f"tcp://127.0.0.1:{free_port()}"
            for rank in range(world_size):
                job = Job(function, args, rank, world_size, point, group_timeout)
                self._workers[rank][1].send_bytes(pickle.dumps(job))
            outcomes = self._collect(world_size, timeout)
        except BaseException:  # the test was ended from outside: late answers are not for the next one
            self.close()
            raise
        lost = [outcome.rank for outcome in outcomes if outcome.exit_code is not None]
        self._retire([self._workers[rank] for rank in lost])
        return outcomes

    def close(self) -> None:
        """End the workers; the next call starts new ones."""
        self._retire(list(self._workers))

    def _retire(self, workers: list[tuple[BaseProcess, Connection]]) -> None:
        for _, connection in workers:
            connection.close()  # upon which a worker returns, and writes down which lines it ran if that is measured
        end = time.monotonic() + _PARTING
        for process, _ in workers:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
            process.join(10)
        self._workers = [worker for worker in self._workers if worker not in workers]

    def _grow(self, world_size: int) -> None:
        fresh = []
        while len(self._workers) < world_size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
            fresh.append(ours)
        for connection in fresh:
            if not connection.poll(_STARTUP):
                raise RemoteError(f"a worker did not start within {_STARTUP:g} s")
            connection.recv_bytes()

    def _collect(self, world_size: int, timeout: float) -> list[Outcome]:
        start = time.monotonic()
        end = start + timeout
        found: dict[int, Outcome] = {}
        while len(found) < world_size:
            waiting = {self._workers[rank][1]: rank for rank in range(world_size) if rank not in found}
            for connection in wait(list(waiting), max(0.0, end - time.monotonic())):
                assert isinstance(connection, Connection)
                outcome = self._receive(waiting[connection], connection, seconds=time.monotonic() - start)
                found[outcome.rank] = outcome
                if not outcome.ok:
                    end = min(end, time.monotonic() + _AFTERMATH)
            if time.monotonic() >= end:
                for rank in set(range(world_size)) - set(found):
                    found[rank] = Outcome(rank, error="hung", exit_code=0, seconds=time.monotonic() - start)
        return [found[rank] for rank in range(world_size)]

    def _receive(self, rank: int, connection: Connection, *, seconds: float) -> Outcome:
        try:
            value, error, details, exit_code = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            process = self._workers[rank][0]
            process.join(10)
            return Outcome(rank, error="died", exit_code=process.exitcode, seconds=seconds)
        return Outcome(rank, value, error, details, exit_code, seconds)


def free_port() -> int:
    """A port that stays free until somebody asks for it by its number: the kernel gives those of its range to whoever comes."""
    kernels = Path("/proc/sys/net/ipv4/ip_local_port_range")
    lowest = int(kernels.read_text().split()[0]) if kernels.is_file() else 0
    while True:
        port = 10_000 + secrets.randbelow(lowest - 10_100) if lowest > 20_000 else 0
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return int(probe.getsockname()[1])


def _serve(connection: Connection) -> None:
    """A worker's life: one job after another, until the pool closes the line."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a run in the background has not
    import torch

    import penstock.comm  # noqa: F401 - imported here, so that the first job does not pay for it

    torch.set_num_threads(1)
    connection.send_bytes(b"ready")
    while True:
        try:
            job = connection.recv_bytes()
        except (EOFError, KeyboardInterrupt):
            return
        answer = pickle.dumps(_work(pickle.loads(job)))
        connection.send_bytes(answer)


def _work(job: Job) -> tuple[Any, str | None, str, int | None]:
    """The value, or the kind of an error and its traceback; an exit code if the process is of no further use."""
    import torch.distributed as dist

    from penstock.comm.distributed import close_all

    bound = timedelta(seconds=job.group_timeout)
    unusable: int | None = 1
    try:
        dist.init_process_group(
            "gloo", init_method=job.meeting_point, rank=job.rank, world_size=job.world_size, timeout=bound
        )
        dist.barrier()  # a rank with nothing to do must not leave before all others are connected
        try:
            value = job.function(*job.args)
        finally:
            close_all()
            dist.destroy_process_group()
            if (
                "torch.distributed.tensor" in sys.modules
            ):  # it knows the groups of meshes of the same shape by their names
                from torch.distributed.tensor.debug import _clear_sharding_prop_cache

                _clear_sharding_prop_cache()
            unusable = None
        pickle.dumps(value)
    except BaseException as error:  # noqa: BLE001 - reported to the test
        return None, type(error).__name__, f"{error}\n{traceback.format_exc()}", unusable
    return value, None, "", None


@contextmanager
def as_torchrun(port: int) -> Iterator[io.StringIO]:
    """Inside, a worker is a process that torchrun has started and that makes its group itself; what it prints is kept."""
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    environment, path, hook = dict(os.environ), list(sys.path), sys.excepthook
    os.environ.update({key: str(value) for key, value in place.items()}, MASTER_ADDR="127.0.0.1")
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield printed
    finally:
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:], sys.excepthook = path, hook
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for the pool to close


_POOL: GlooPool | None = None


@pytest.fixture(scope="session")
def gloo_pool() -> Iterator[GlooPool]:
    """The pool of this test session; its processes start when a test first needs them."""
    global _POOL
    if _POOL is None:
        _POOL = GlooPool()
    yield _POOL
    _POOL.close()
