"""From a captured stage to a stage that a schedule can run."""

from __future__ import annotations

from typing import Any

import torch

from penstock.capture.pipe_info import PipeInfo, StageRoutes
from penstock.capture.stage_module import StageModule
from penstock.stage.pipeline_stage import PipelineStage


class CapturedStage(PipelineStage):
    """A stage around a captured module: it reads what its wires say, not all that the stage before returns.

    stage = pipe.build_stage(rank, device)  # of pipe = penstock.pipeline(model, (x,))
    """

    routes: StageRoutes

    def __init__(
        self,
        stage_module: StageModule,
        stage_index: int,
        pipe_info: PipeInfo,
        device: torch.device | str,
        group: Any = None,
    ) -> None:
        super().__init__(stage_module.to(device), stage_index, pipe_info.num_stages, device, group=group)
        self.routes = StageRoutes(pipe_info, stage_index)
        self.pipe_info = pipe_info


def build_stage(
    stage_module: StageModule, stage_index: int, pipe_info: PipeInfo, device: torch.device | str, group: Any = None
) -> CapturedStage:
    """A stage for a schedule, around a captured module that is moved to `device`.

    stage = build_stage(pipe.get_stage_module(0), 0, pipe.info(), "cpu")
    """
    return CapturedStage(stage_module, stage_index, pipe_info, device, group)
