"""`penstock train`: a small language model on real text, or the user's own model, over pipelined processes.

Names are resolved when they are first used, so that the command can show its options without loading torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.train.events import EventLog, StepEvent
    from penstock.train.loggers import Logger
    from penstock.train.traces import traced
    from penstock.train.train_job import Job
    from penstock.train.train_options import TrainOptions

_HOME = {"EventLog": "events", "StepEvent": "events", "Logger": "loggers", "traced": "traces", "Job": "train_job"}
_HOME |= {"TrainOptions": "train_options"}
__all__ = ["EventLog", "Job", "Logger", "StepEvent", "TrainOptions", "traced"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
