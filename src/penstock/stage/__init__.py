"""One stage: its module and its wires; forward; backward: full, input, weight.

stage      pipeline_stage (and what a captured one reads), digest (of a model)
boundary   boundary (what crosses, taken apart), dtensors (parts that are spread over a mesh)
backward   backward (in one piece or in two), engine; for two: intercept (layers that put their weights off), calls
           and deferred (what they remember), batched (the weight pass)
memory     chunked_loss, held (bytes that are alive), buffers (state that a forward changes)
"""

from __future__ import annotations

from penstock.stage.pipeline_stage import PipelineStage

__all__ = ["PipelineStage"]
