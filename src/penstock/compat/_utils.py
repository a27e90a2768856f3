"""`torch.distributed.pipelining._utils`."""

from __future__ import annotations

from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.compat._metadata import _DTensorMeta, _TensorMeta
from penstock.compat._siblings import found_in
from penstock.errors import PlanError, ShapeError
from penstock.nest import Value
from penstock.plan import Placement

PipeliningMetadataError = PipeliningShapeError = ShapeError
TensorMeta = _TensorMeta | _DTensorMeta
__getattr__ = found_in(__name__, "._metadata", "._IR", "..capture")


def flatten_args(args: Value, *, detach: bool = False) -> Value:
    """The leaves of nested arguments; with `detach`, the arguments again with fresh leaves, and these leaves."""
    if not detach:
        return pytree.tree_leaves(args)
    fresh = pytree.tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), args)
    return fresh, pytree.tree_leaves(fresh)


def flatten_args_detach(args: Value) -> Value:
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
