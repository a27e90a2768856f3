"""One stage: its module and its wires; forward; backward: full, input, weight."""

from __future__ import annotations

from penstock.stage.pipeline_stage import PipelineStage

__all__ = ["PipelineStage"]
