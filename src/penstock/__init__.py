"""penstock: pipeline parallelism for PyTorch that is planned, proved, measured and shown."""

from __future__ import annotations

__version__ = "0.1.0"
