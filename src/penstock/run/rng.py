"""Random numbers that do not depend on the schedule: keyed by seed, stage, microbatch and step.

with microbatch_rng(seed=0, stage=1, microbatch=3, step=7):
    output = module(x)      # draws what stage 1 draws for microbatch 3 in step 7, whatever the schedule
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from penstock.stage.buffers import RandomState, accelerators


@contextmanager
def microbatch_rng(
    *, seed: int, stage: int, microbatch: int, step: int, device: torch.device | None = None
) -> Iterator[None]:
    """Inside, random numbers are those of this seed, stage, microbatch and step; outside, nothing has moved.

        with microbatch_rng(seed=0, stage=1, microbatch=3, step=7):
            torch.rand(1)

    `device`: where the stage computes; None stands for the accelerator of this process, or the CPU if there is none.
    """
    text = f"penstock {seed} {stage} {microbatch} {step}"
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
    device = device or torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    devices = accelerators(device, ())  # an accelerator that nobody uses stays closed
    before = RandomState(devices)
    try:
        # What is seeded is what is put back: torch.manual_seed would seed the other devices as well.
        torch.default_generator.manual_seed(number)
        for one in devices:
            with torch.accelerator.device_index(one.index):
                torch.get_device_module(one).manual_seed(number)
        yield
    finally:
        before.set()


class MicrobatchRng:
    """The random state of a schedule with ``rng="per-microbatch"``."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.device = seed, device

    def at(self, stage: int, microbatch: int, step: int) -> AbstractContextManager[None]:
        return microbatch_rng(seed=self.seed, stage=stage, microbatch=microbatch, step=step, device=self.device)
