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
    device: torch.device,
    bound: float,
    *,
    look: Callable[[], None] | None = None,
    everybody: Callable[[], str] | None = None,
) -> None:
    """Wait until the device has done what it was told.

    ``look``       called now and then; ends the wait by raising.
    ``everybody``  asked when the wait has run out: a table of where all ranks are.
    """
    done = torch.Event(device=device)
    done.record(torch.accelerator.current_stream(device))  # that of this device, which need not be the current one
    start, nap, looked = time.monotonic(), 1e-5, 0.0
    while not done.query():
        passed = time.monotonic() - start
        if passed > bound:
            where = "" if everybody is None else f"\n{everybody()}"
            raise StepTimeout(f"{device} did not finish within {bound:g} s what it was told to do{where}")
        if look is not None and passed > looked + _BETWEEN_LOOKS:
            look()
            looked = passed
        time.sleep(nap)
        nap = min(2 * nap, 0.005)
