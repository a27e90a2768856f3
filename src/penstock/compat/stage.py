"""`torch.distributed.pipelining.stage`."""

from __future__ import annotations

import torch.distributed as dist  # noqa: F401  programs patch what stands here

from penstock.capture import CapturedStage as _PipelineStage
from penstock.capture import build_stage
from penstock.compat._siblings import found_in
from penstock.stage.base import StageBase as _PipelineStageBase
from penstock.stage.exchange import RecvInfo as _RecvInfo
from penstock.stage.exchange import RootArg as _RootArgPlaceholder
from penstock.stage.exchange import as_tuple as _normalize_model_output_as_tuple
from penstock.stage.metadata import empty_like_meta as _make_tensor_from_meta
from penstock.stage.stage import PipelineStage

InputInfo = _RecvInfo | _RootArgPlaceholder
__getattr__ = found_in(__name__, "_utils", "_backward", "_debug")

__all__ = [
    "InputInfo",
    "PipelineStage",
    "_PipelineStage",
    "_PipelineStageBase",
    "_RecvInfo",
    "_RootArgPlaceholder",
    "_make_tensor_from_meta",
    "_normalize_model_output_as_tuple",
    "build_stage",
]
