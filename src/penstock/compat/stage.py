"""`torch.distributed.pipelining.stage`."""

from __future__ import annotations

from penstock.compat._infer import PipelineStage
from penstock.compat._IR import build_stage
from penstock.compat._metadata import RecvInfo as _RecvInfo
from penstock.compat._metadata import RootArgPlaceholder
from penstock.compat._siblings import found_in
from penstock.compat._stage_base import _PipelineStageBase  # noqa: F401  programs inherit from it

InputInfo = _RecvInfo | RootArgPlaceholder
__getattr__ = found_in(__name__, "._IR", "._exchange", "._metadata")
__all__ = ["PipelineStage", "build_stage"]
