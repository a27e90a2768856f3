"""`torch.distributed.pipelining.stage`."""

from __future__ import annotations

from penstock.compat._captured import build_stage
from penstock.compat._infer import PipelineStage
from penstock.compat._siblings import found_in
from penstock.compat._stage_base import _PipelineStageBase  # noqa: F401  programs inherit from it
from penstock.compat._state import RecvInfo as _RecvInfo
from penstock.compat._state import RootArgPlaceholder

InputInfo = _RecvInfo | RootArgPlaceholder
__getattr__ = found_in(__name__, "._captured", "._exchange", "._metadata", "._state")
__all__ = ["PipelineStage", "build_stage"]
