"""StageBase: what every stage is, whoever drives it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.errors import PlaceError, StageError
from penstock.stage.chunks import Chunks

HOOKS = (
    "forward_one_chunk",
    "backward_one_chunk",
    "backward_weight_one_chunk",
    "forward_maybe_with_nosync",
    "backward_maybe_with_nosync",
    "scale_grads",
    "perform_reduce_grad",
    "get_fwd_recv_ops",
    "get_fwd_send_ops",
    "get_bwd_recv_ops",
    "get_bwd_send_ops",
    "set_local_fwd_input",
    "set_local_bwd_input",
    "get_local_bwd_output",
    "_prepare_forward_infra",
    "_prepare_backward_infra",
)
"""Methods that subclasses override to take part in a step."""


class StageBase(Chunks):
    """The base of all stages. A subclass that calls no constructor sets at least `submod`, `num_stages`, `group_size`,
    `group_rank` and `group`; that is enough to build a schedule and to read its order.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,  # from 0
        num_stages: int,  # of the whole pipeline
        device: torch.device | str,
        group: Any = None,  # a process group, a transport, or None for the default group
        dw_builder: Callable[[], Callable[..., None]] | None = None,
    ) -> None:
        if not isinstance(submodule, nn.Module):
            raise StageError(f"a stage needs an nn.Module, got {type(submodule).__name__}")
        if not 0 <= stage_index < num_stages:
            raise PlaceError(f"stage_index={stage_index} with num_stages={num_stages}; expected 0 to {num_stages - 1}")
        self.submod = submodule
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.device = torch.device(device)
        self.group = group
        self.dw_builder = dw_builder
        self.group_rank, self.group_size = place_in(group)
        if self.group_size > num_stages:
            raise StageError(f"{self.group_size} ranks for {num_stages} stages; expected at least one stage a rank")

    def _prepare_forward_infra(
        self, num_microbatches: int, args: Any, kwargs: dict[str, Any] | None = None, has_backward: bool = False
    ) -> Any:
        raise StageError(f"{type(self).__name__} does not say what it receives; override _prepare_forward_infra")

    def _prepare_backward_infra(
        self,
        num_microbatches: int,
        loss_fn: Any = None,
        target: Any = None,
        received_grad_meta: Any = None,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        raise StageError(
            f"{type(self).__name__} does not say what gradients it receives; override _prepare_backward_infra"
        )


def place_in(group: Any) -> tuple[int, int]:
    """This rank and the number of ranks: of a process group, of a transport, of the default group, or one rank alone."""
    if group is not None and hasattr(group, "num_ranks"):
        return group.rank, group.num_ranks
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)
