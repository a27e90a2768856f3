"""Messages between ranks: what the runtime asks for, over torch.distributed, and over threads of one process.

asked      transport (messages, a store, news of failures), messages (one of them), framing and decoding (what they say)
processes  distributed (over torch.distributed), accelerator (between devices), line and switchboard (small messages of one
           host), store, collectives (over a tree of messages), host_group (replicas), device_wait
threads    local (ranks of one process), with baton
"""

from __future__ import annotations

from penstock.comm.distributed import DistributedTransport
from penstock.comm.local import LocalTransport, LocalWorld
from penstock.comm.messages import Work
from penstock.comm.transport import Store, Transport
from penstock.health.failure import FailureRecord

__all__ = ["DistributedTransport", "FailureRecord", "LocalTransport", "LocalWorld", "Store", "Transport", "Work"]
