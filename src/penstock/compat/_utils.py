"""`torch.distributed.pipelining._utils`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.capture import PipeInfo
from penstock.compat._metadata import (
    GetMeshCallback,
    InferenceMode,
    _derive_grad_metas,
    _DTensorMeta,
    _make_tensor_from_meta,
    _MeshCache,
    _StageBackwardMeta,
    _StageForwardMeta,
    _StageMeta,
    _TensorMeta,
    extract_tensor_meta,
    extract_tensor_metas,
    to_local_if_dtensor,
    validate_and_normalize_to_tuple,
    validate_metadata,
    validate_static_arg_grad_correspondence,
    validate_tensors_metadata,
)
from penstock.compat._metadata import MeshKey as MeshCacheKey
from penstock.compat._siblings import found_in
from penstock.errors import PlanError
from penstock.errors import ShapeError as PipeliningMetadataError
from penstock.errors import ShapeError as PipeliningShapeError
from penstock.plan import Placement

__getattr__ = found_in(__name__)
TensorMeta = _TensorMeta | _DTensorMeta

__all__ = [
    "GetMeshCallback",
    "InferenceMode",
    "MeshCacheKey",
    "PipeInfo",
    "PipeliningMetadataError",
    "PipeliningShapeError",
    "TensorMeta",
    "_DTensorMeta",
    "_MeshCache",
    "_StageBackwardMeta",
    "_StageForwardMeta",
    "_StageMeta",
    "_TensorMeta",
    "_derive_grad_metas",
    "_make_tensor_from_meta",
    "extract_tensor_meta",
    "extract_tensor_metas",
    "flatten_args",
    "flatten_args_detach",
    "generate_rank_to_stage_mapping",
    "generate_stage_to_rank_mapping",
    "to_local_if_dtensor",
    "validate_and_normalize_to_tuple",
    "validate_metadata",
    "validate_static_arg_grad_correspondence",
    "validate_tensors_metadata",
]


def flatten_args(args: Any, *, detach: bool = False) -> Any:
    """The leaves of nested arguments; with `detach`, the arguments again with fresh leaves, and these leaves."""
    if not detach:
        return pytree.tree_leaves(args)
    fresh = pytree.tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), args)
    return fresh, pytree.tree_leaves(fresh)


def flatten_args_detach(args: Any) -> Any:
    return flatten_args(args, detach=True)


def generate_stage_to_rank_mapping(pp_size: int, num_stages: int, style: str = "loop") -> dict[int, int]:
    """Which rank holds which stage.

    >>> generate_stage_to_rank_mapping(2, 4, style="v")
    {0: 0, 1: 1, 2: 1, 3: 0}
    """
    if style == "loop":
        return {stage: stage % pp_size for stage in range(num_stages)}
    if style != "v":
        raise PlanError(f"style={style!r}; expected 'loop' or 'v'")
    per_rank, rest = divmod(num_stages, pp_size)
    if rest:
        raise PlanError(f"{num_stages} stages in a V over {pp_size} ranks; expected the same number on every rank")
    return dict(enumerate(Placement.v(pp_size, per_rank).ranks))


def generate_rank_to_stage_mapping(pp_size: int, num_stages: int, style: str = "loop") -> dict[int, list[int]]:
    """Which stages each rank holds, in order."""
    stages: dict[int, list[int]] = {}
    for stage, rank in generate_stage_to_rank_mapping(pp_size, num_stages, style).items():
        stages.setdefault(rank, []).append(stage)
    return stages
