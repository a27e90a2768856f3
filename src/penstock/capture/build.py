"""From a captured stage to a stage that a schedule can run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from penstock.capture.info import PipeInfo
    from penstock.capture.module import StageModule


def build_stage(
    stage_module: StageModule, stage_index: int, pipe_info: PipeInfo, device: torch.device | str, group: Any = None
) -> Any:
    """A stage of the runtime around a captured module, on `device`.

    stage = build_stage(pipe.get_stage_module(0), 0, pipe.info(), "cpu")
    """
    from penstock.stage import captured_stage

    return captured_stage(stage_module.to(device), stage_index, pipe_info=pipe_info, device=torch.device(device), group=group)
