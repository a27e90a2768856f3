"""How fast what forwards saved can be moved away and back: found by moving some bytes, before a plan may have O and L.

speed = copy_bandwidth(torch.device("cpu"), Folder("/scratch"))     # bytes a second
"""

from __future__ import annotations

import time

import torch

from penstock.comm.device_wait import wait_for_device
from penstock.stage.elsewhere import Elsewhere

_SIZE = 8 << 20  # bytes of a copy
_ROUNDS = 3
_BOUND = 60.0  # seconds that one of them may take on a device


def copy_bandwidth(device: torch.device, elsewhere: Elsewhere) -> float:
    """Bytes a second of a copy, the mean of the way there and the way back; the best of some rounds.

    >>> from penstock.stage.elsewhere import HostMemory
    >>> copy_bandwidth(torch.device("cpu"), HostMemory()) > 0
    True
    """
    flat = torch.zeros(_SIZE, dtype=torch.uint8, device=device)
    elsewhere.put(flat).back()  # what is made once, such as a stream, is made
    return 2 * _SIZE / min(_round_trip(flat, elsewhere) for _ in range(_ROUNDS))


def _round_trip(flat: torch.Tensor, elsewhere: Elsewhere) -> float:
    """Seconds there and back: of the host, or on a device by its own events, since the host does not wait for copies."""
    if flat.is_cpu:
        start = time.perf_counter()
        elsewhere.put(flat).back()
        return max(time.perf_counter() - start, 1e-9)
    begin, end = (torch.Event(flat.device, enable_timing=True) for _ in range(2))
    begin.record()
    elsewhere.put(flat).back()
    end.record()
    wait_for_device(flat.device, _BOUND)
    return max(begin.elapsed_time(end) / 1e3, 1e-9)
