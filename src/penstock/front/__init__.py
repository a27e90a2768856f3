"""The front door: one call pipelines a model, the same on every rank.

pipe = penstock.Pipeline(model, example=(tokens,), loss_fn=loss, schedule="auto", microbatches=8)
result = pipe.step(tokens, target=labels)
"""

from __future__ import annotations

from penstock.front.choice import Choice, Tried
from penstock.front.choose import choose
from penstock.front.dimensions import shard_parameters
from penstock.front.grouping import GroupRows
from penstock.front.loading import Checkpoint, load
from penstock.front.pipeline import Pipeline
from penstock.front.result import Result
from penstock.front.saving import Saving

__all__ = [
    "Checkpoint",
    "Choice",
    "GroupRows",
    "Pipeline",
    "Result",
    "Saving",
    "Tried",
    "choose",
    "load",
    "shard_parameters",
]
