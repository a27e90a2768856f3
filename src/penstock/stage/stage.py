"""PipelineStage: a module, its place in the pipeline, and the ranks that it speaks with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from penstock.stage.base import HOOKS, StageBase, place_in
from penstock.stage.infer import Inference
from penstock.stage.routes import Routes

__all__ = ["PipelineStage", "is_driven_by_hand", "place_in"]


class PipelineStage(Inference, StageBase):
    """One stage of a pipeline.

        stage = PipelineStage(module, stage_index=0, num_stages=2, device=torch.device("cpu"))
        schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)

    `group` is a process group, or None for the default one; ranks as threads (`penstock.comm.LocalWorld`) pass their
    transport. `input_args` and `output_args` (tensors, or what has their shape and dtype) are optional: penstock finds
    shapes by itself; given, they are checked. `dw_builder` makes the weight work of a split backward by hand.
    """

    routes: Routes | None = None  # set by capture; a hand-made stage reads all that the stage before it returns

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,  # from 0
        num_stages: int,  # of the whole pipeline
        device: torch.device | str,
        input_args: Any = None,
        output_args: Any = None,
        output_grads: Any = None,
        input_grads: Any = None,
        group: Any = None,
        dw_builder: Callable[[], Callable[..., None]] | None = None,
        get_mesh: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(submodule, stage_index, num_stages, device, group, dw_builder)
        self.get_mesh = get_mesh
        self.input_args = input_args
        self.output_args = output_args
        self.input_grads = input_grads
        self.output_grads = output_grads

    def __repr__(self) -> str:
        return f"PipelineStage({self.stage_index} of {self.num_stages}, {type(self.submod).__name__}, rank {self.group_rank})"


def is_driven_by_hand(stage: Any) -> bool:
    """Whether a step has to go through the stage's own methods: some of them are the user's, or checks are wanted."""
    if not isinstance(stage, PipelineStage) or stage._runtime_validate:
        return True
    kind = type(stage)
    return kind is not PipelineStage and any(getattr(kind, hook) is not getattr(PipelineStage, hook) for hook in HOOKS)
