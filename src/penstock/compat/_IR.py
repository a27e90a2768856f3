"""`torch.distributed.pipelining._IR`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Self

import torch
from torch import fx, nn
from torch.export import ExportedProgram, export
from torch.utils import _pytree as pytree

from penstock import capture
from penstock.capture import MultiUseParameterConfig, SplitPoint, StageModule
from penstock.compat._captured import NAME as PP_SUBMOD_PREFIX  # noqa: F401  torch has it here
from penstock.compat._captured import PipeInfo, _PipelineStage, build_stage, get_submod_name
from penstock.compat._siblings import found_in
from penstock.errors import CaptureError
from penstock.nest import Value
from penstock.stage.pipeline_stage import Group

MultiUseParamSpec = MultiUseParameterConfig | dict[str, MultiUseParameterConfig]
__getattr__ = found_in(__name__, "..capture")


class Pipe(capture.Pipe):
    """A pipe that returns the leaves of the model's output as a tuple, as torch's does."""

    _info: PipeInfo

    def __init__(self, stages: Sequence[StageModule], info: capture.PipeInfo) -> None:
        super().__init__(stages, PipeInfo.of(replace(info, inputs=replace(info.inputs, as_given=True))))
        for stage in stages:
            stage.bare = True  # so that stage modules compose, and a loss function gets the model's tensors
            stage.own_only = stage.is_last and not info.has_loss  # and of these the ones that the last stage computes

    @classmethod
    def from_tracing(cls, *args: Value, **options: Value) -> Self:
        """Capture a model. Only the rank of the first stage needs the model's arguments."""
        return super().from_tracing(*args, **{"arguments_from_first": True, **options})

    @staticmethod
    def _trace_with_export(
        mod: nn.Module, example_args: tuple[Value, ...], example_kwargs: Mapping[str, Value] | None = None
    ) -> ExportedProgram:
        """Export a model; for `_from_traced`, and to look at."""
        return export(mod, example_args, dict(example_kwargs or {}))

    @classmethod
    def _from_traced(
        cls,
        mod: nn.Module,
        exported_program: ExportedProgram,
        multi_use_param_spec: object = None,
        output_loss_value_spec: object = None,
        split_policy: object = None,
    ) -> Self:
        """Capture a model for the example with which it was exported."""
        if exported_program.example_inputs is None:
            raise CaptureError(
                "the exported program holds no example inputs; use Pipe.from_tracing(model, example_args)"
            )
        args, kwargs = exported_program.example_inputs
        specs = {"multi_use_param_spec": multi_use_param_spec, "output_loss_value_spec": output_loss_value_spec}
        return cls.from_tracing(mod, args, kwargs, split_policy, **specs)

    def forward(self, *args: Value, **kwargs: Value) -> tuple[Value, ...]:
        return tuple(pytree.tree_leaves(super().forward(*args, **kwargs)))

    def build_stage(self, stage_index: int, device: torch.device | str, group: Group = None) -> _PipelineStage:
        return build_stage(self.get_stage_module(stage_index), stage_index, self.info(), device, group)

    def info(self) -> PipeInfo:
        """What travels between the stages, and the graph in which each is a node."""
        return self._info

    # Whether the model returns its own loss.
    has_loss_and_backward = cached_property[bool](lambda self: self.info().has_loss)
    # The parameters of several stages whose gradients a program has to add up by itself: none, a step does that.
    replicated_params = cached_property[list[dict[str, str]]](lambda _: [])

    @property
    def split_gm(self) -> fx.GraphModule:
        """The stages as torch's captured graph holds them: `submod_pp_0`, `submod_pp_1` and so on, and how they connect."""
        whole = {get_submod_name(index): stage for index, stage in enumerate(self.stages)}
        return fx.GraphModule(whole, self.info().graph)


def pipeline(
    module: nn.Module,
    mb_args: tuple[Value, ...],
    mb_kwargs: dict[str, Value] | None = None,
    split_spec: dict[str, SplitPoint] | None = None,
    split_policy: object = None,
    **options: object,
) -> Pipe:
    """Capture a model and cut it into stages; see `penstock.capture`. Called as a whole, the pipe returns a tuple.

    Only the rank of the first stage needs the model's arguments.
    """
    return Pipe.from_tracing(module, mb_args, mb_kwargs, split_policy, split_spec=split_spec, **options)


def annotate_split_points(mod: nn.Module, spec: Mapping[str, SplitPoint]) -> None:
    """Mark submodules, by their names, before or after which to cut."""
    capture.annotate_split_points(mod, spec)


def _move_placeholders_to_front(graph: fx.Graph) -> None:
    """Put the inputs of a graph before everything else, in their order."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    others = [node for node in graph.nodes if node.op != "placeholder"]
    for node in inputs if others else ():
        others[0].prepend(node)
