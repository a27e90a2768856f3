"""`penstock train`: a small language model on real text, or the user's own model, over pipelined processes."""

from __future__ import annotations

from penstock.train.job import Job
from penstock.train.options import TrainOptions

__all__ = ["Job", "TrainOptions"]
