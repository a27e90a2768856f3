"""Processes with the simulated device and the strict process group, started once and used by many tests.

    def test_exchange(sim):
        assert sim.run(2, "eager", exchange, 3.0) == [...]     # exchange is a function at module level

With `--device cuda` (or another device that torch knows) the same functions run on that device, with its own backend.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

from tests.gloo_pool import GlooPool, Outcome, RemoteError

Mode = Literal["lazy", "eager"]
BOUND = 40.0  # seconds; a wait of the device or of the group counts as stuck after half of them
PATIENCE = 150.0  # seconds after which a test counts as stuck; the first of a process also imports torch and the device


PRELOADED = (
    "torch",
    "torch._meta_registrations",
    "torch.distributed.tensor",
    "penstock",
    "penstock.comm",
    "penstock.run",
    "penstock.front",
)


class SimPool:
    """`run` gives the results of all ranks, `outcomes` what became of each."""

    def __init__(self, device: str = "sim") -> None:
        self.device = device
        self._pool = GlooPool(
            preload=PRELOADED if device == "sim" else ()
        )  # a real one may not be opened before a fork
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-sim-")
        self._numbers = itertools.count()

    def run(
        self, ranks: int, mode: Mode, function: Callable[..., Any], *args: Any, timeout: float = PATIENCE
    ) -> list[Any]:
        found = self.outcomes(ranks, mode, function, *args, timeout=timeout)
        failed = sorted((outcome for outcome in found if not outcome.ok), key=lambda outcome: outcome.seconds)
        if failed:
            raise RemoteError("\n".join(f"rank {each.rank}: {each.error}\n{each.details}" for each in failed))
        return [outcome.value for outcome in found]

    def outcomes(
        self, ranks: int, mode: Mode, function: Callable[..., Any], *args: Any, timeout: float = PATIENCE
    ) -> list[Outcome]:
        found = self._pool.outcomes(ranks, in_group, *self._job(mode, function, args), timeout=timeout)
        if any(not outcome.ok and outcome.exit_code is None for outcome in found):
            self._pool.close()  # a device with stuck streams is of no further use; processes that ended are replaced
        return found

    def close(self) -> None:
        self._pool.close()
        self._pool._directory.cleanup()
        self._folder.cleanup()

    def _job(self, mode: Mode, function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
        return self.device, mode, f"{self._folder.name}/{next(self._numbers)}", function, args


def in_group(device: str, mode: Mode, point: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """In a worker: the function, in a process group of the device's own backend and nothing else, as with "nccl"."""
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    place = prepare(device, rank)
    dist.init_process_group(
        "strict" if device == "sim" else None,
        init_method=f"file://{point}",
        rank=rank,
        world_size=size,
        device_id=place if mode == "eager" else None,
        timeout=timedelta(seconds=BOUND / 2),
    )
    torch.accelerator.set_device_index(place.index)
    value = function(place, *args)
    settle(device)
    return value


def prepare(device: str, rank: int) -> Any:
    """The device of this rank, with nothing noted about it."""
    import torch

    if device != "sim":
        count = torch.get_device_module(device).device_count()
        if rank >= count:
            raise RuntimeError(f"rank {rank} needs a device of its own, and there are {count} of kind {device}")
        return torch.device(device, rank)
    from tests.accelerator.device import load

    sim = load()
    settle(device)
    sim.reset()
    sim.forget_communicators()
    return torch.device("sim", 0)


def settle(device: str) -> None:
    """Let the simulated device finish. A test may not leave it stuck: the next one to use this process would be."""
    if device != "sim":
        return
    from tests.accelerator.device import load

    sim = load()
    sim.set_hang_after(BOUND / 2)
    sim.set_kernel_time(0.0)
    for number in range(sim.device_count()):
        try:
            sim.synchronize(number)
        except RuntimeError as error:  # of what was aborted, or failed on purpose
            if "the simulated device hangs" in str(error):
                raise
