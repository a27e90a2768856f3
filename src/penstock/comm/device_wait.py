"""Waiting for a device, with a bound: by asking it again and again, since its own wait could not be ended.

wait_for_device(torch.device("cuda"), 60.0)
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from penstock.errors import StepTimeout

_BETWEEN_LOOKS = 0.2  # seconds between looks at the peers


def wait_for_device(
    device: torch.device, bound: float, *, look: Callable[[], object] = bool, everybody: Callable[[], str] = str
) -> None:
    """Wait until the device has done what it was told.

    ``look``       called now and then; ends the wait by raising. By itself it does nothing.
    ``everybody``  asked when the wait has run out: a table of where all ranks are. By itself it is empty.
    """
    done = torch.Event(device=device)
    done.record(torch.accelerator.current_stream(device))  # that of this device, which need not be the current one
    start, nap, looked = time.monotonic(), 1e-5, 0.0
    while not done.query():
        passed = time.monotonic() - start
        if passed > bound:
            late = f"{device} did not finish within {bound:g} s what it was told to do"
            raise StepTimeout(f"{late}\n{everybody()}".rstrip())
        if passed > looked + _BETWEEN_LOOKS:
            look()
            looked = passed
        time.sleep(nap)
        nap = min(2 * nap, 0.005)
