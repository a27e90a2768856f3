"""Messages between ranks: what the runtime asks for, over torch.distributed, and over threads of one process."""

from __future__ import annotations

from penstock.comm.local import LocalTransport, LocalWorld
from penstock.comm.transport import FailureRecord, Store, Transport, Work

__all__ = ["FailureRecord", "LocalTransport", "LocalWorld", "Store", "Transport", "Work"]
