"""Data-parallel adapters behind one protocol: none, DistributedDataParallel, `fully_shard` (FSDP2) and `replicate`."""

from __future__ import annotations

from penstock.parallel.adapt import adapt, unwrap, wrap
from penstock.parallel.protocol import DataParallel, Unwrapped

__all__ = ["DataParallel", "Unwrapped", "adapt", "unwrap", "wrap"]
