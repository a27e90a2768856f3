"""`penstock train`: a small language model on real text, or the user's own model, over pipelined processes."""

from __future__ import annotations

from penstock.train.events import EventLog, StepEvent
from penstock.train.loggers import Logger
from penstock.train.traces import traced
from penstock.train.train_job import Job
from penstock.train.train_options import TrainOptions

__all__ = ["EventLog", "Job", "Logger", "StepEvent", "TrainOptions", "traced"]
