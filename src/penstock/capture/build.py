"""From a captured stage to a stage that a schedule can run."""

from __future__ import annotations

from typing import Any

import torch

from penstock.capture.info import PipeInfo
from penstock.capture.module import StageModule
from penstock.capture.routes import StageRoutes
from penstock.stage.stage import PipelineStage


def build_stage(
    stage_module: StageModule, stage_index: int, pipe_info: PipeInfo, device: torch.device | str, group: Any = None
) -> PipelineStage:
    """A stage for a schedule, around a captured module that is moved to `device`.

    stage = build_stage(pipe.get_stage_module(0), 0, pipe.info(), "cpu")
    """
    stage = PipelineStage(stage_module.to(device), stage_index, pipe_info.num_stages, device, group=group)
    stage.routes = StageRoutes(pipe_info, stage_index)
    return stage
