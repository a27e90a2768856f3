"""`torch.distributed.pipelining.stage`."""

from __future__ import annotations

import torch.distributed as dist  # noqa: F401  programs patch what stands here

from penstock.compat._captured import _PipelineStage, build_stage
from penstock.compat._exchange import RecvInfo as _RecvInfo
from penstock.compat._exchange import RootArg as _RootArgPlaceholder
from penstock.compat._exchange import as_tuple as _normalize_model_output_as_tuple
from penstock.compat._infer import PipelineStage
from penstock.compat._metadata import _make_tensor_from_meta
from penstock.compat._siblings import found_in
from penstock.compat._stage_base import _PipelineStageBase

InputInfo = _RecvInfo | _RootArgPlaceholder
__getattr__ = found_in(__name__)

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
