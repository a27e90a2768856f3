"""Messages between ranks: what the runtime asks for, over torch.distributed, and over threads of one process."""

from __future__ import annotations

from penstock.comm.distributed import DistributedTransport
from penstock.comm.local import LocalTransport, LocalWorld
from penstock.comm.messages import Work
from penstock.comm.transport import FailureRecord, Store, Transport

__all__ = ["DistributedTransport", "FailureRecord", "LocalTransport", "LocalWorld", "Store", "Transport", "Work"]
