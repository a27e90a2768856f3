"""The front door: one call pipelines a model, the same on every rank.

    pipe = penstock.Pipeline(model, example=(tokens,), loss_fn=loss, schedule="auto", microbatches=8)
    result = pipe.step(tokens, target=labels)

From the call to the step:

    asked    pipeline_options (the options, in four groups), compared (which must be the same on every rank)
    known    ends (who takes part), machine (what actions, messages and copies cost), model_profile (what layers cost)
    chosen   candidates (plans and cuts), choose (the fastest, within a limit of memory), choice (what stages cost, and what was
             chosen) and choice_text
    built    build (of a captured model, or of stages made by hand), dimensions (stages spread over a mesh), own_stages and names
    stepped  pipeline, evaluate (rows of an evaluation), loss_weights and loss_probe (how much a microbatch counts),
             spread (losses to all ranks, outputs to whoever wants them), norm
    changed  replan (plan and cut, after a rank ran out of memory or by measured steps), memory_view (what is held)
    kept     saving and loading, with companions (optimizer, scheduler, whatever has a state); publish (for others)
"""

from __future__ import annotations

from penstock.batch.group_rows import GroupRows
from penstock.front.choice import Choice, Tried
from penstock.front.choose import choose
from penstock.front.dimensions import shard_parameters
from penstock.front.loading import Checkpoint, load
from penstock.front.pipeline import Pipeline
from penstock.front.saving import Saving
from penstock.front.spread import Result

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
