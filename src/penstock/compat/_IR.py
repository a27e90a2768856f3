"""`torch.distributed.pipelining._IR`: captured models and their stages, as programs drive them.

pipe.info().graph.print_tabular()  # in torch's words: the graph in which each stage is one node
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property, reduce
from itertools import islice
from typing import Self

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram, export
from torch.utils import _pytree as pytree

from penstock import capture
from penstock.capture import MultiUseParameterConfig, SplitPoint, StageModule
from penstock.capture import PipeInfo as CoreInfo
from penstock.capture.pipe import CapturedStage
from penstock.compat._backward import _null_coalesce_accumulate
from penstock.compat._siblings import found_in
from penstock.compat.stage import PipelineStage
from penstock.errors import CaptureError
from penstock.nest import Value
from penstock.stage.pipeline_stage import Group

MultiUseParamSpec = MultiUseParameterConfig | dict[str, MultiUseParameterConfig]
__getattr__ = found_in(__name__, "..capture")
PP_SUBMOD_PREFIX = "submod_pp"  # of a stage in the graph of stages, before its number


def get_submod_name(stage_idx: int) -> str:
    """What torch calls a stage in its captured graph."""
    return f"{PP_SUBMOD_PREFIX}_{stage_idx}"


class PipeInfo(CoreInfo):
    """Penstock's, and what programs read beside it."""

    @classmethod
    def of(cls, info: CoreInfo) -> PipeInfo:
        return cls(**{field.name: getattr(info, field.name) for field in fields(info)})

    # Whether the model returns its own loss.
    has_loss_and_backward = cached_property[bool](lambda self: self.has_loss)

    @cached_property
    def graph(self) -> fx.Graph:
        """The stages as nodes, and the values that travel between them. It returns the leaves of the model's output."""
        graph, last = fx.Graph(), self.num_stages - 1
        values: dict[str, fx.Node] = {}
        for name in self.inputs.names:
            values[name] = node = graph.placeholder(re.sub(r"\W+", "_", name).strip("_"))
            node.target = node.name  # which the graph keeps apart from others
        for stage in range(self.num_stages):
            name = get_submod_name(stage)
            node = graph.call_module(name, tuple(values[wire.name] for wire in self.stage_inputs[stage]))
            node.name = name
            made = self.stage_outputs[stage]
            if stage == last:  # of the leaves of the output it returns those that it computes itself, or else all
                made = tuple(wire for wire in made if wire.name not in values) or made
            for place, wire in enumerate(made):
                values[wire.name] = node if len(made) == 1 else graph.call_function(operator.getitem, (node, place))
        graph.output(tuple(values[wire.name] for wire in self.stage_outputs[last]))
        return graph


class _PipelineStage(CapturedStage, PipelineStage):
    """A stage around a captured module, with everything that programs find on torch's."""

    pipe_info: PipeInfo
    _hears_all = True

    name = cached_property[str](lambda self: get_submod_name(self.stage_index))

    @property
    def node(self) -> fx.Node:
        """This stage in the graph of the model's stages."""
        nodes: list[fx.Node] = list(self.pipe_info.graph.nodes)
        return next(node for node in nodes if node.target == self.name)

    submod_to_stage_index = cached_property[dict[str, int]](
        lambda self: {get_submod_name(stage): stage for stage in range(self.num_stages)}
    )

    def _move_submod_to_device(self) -> None:
        self.submod.to(self.device)

    def get_stage_index_of_submod(self, submod_name: str) -> int:
        """The stage of that name."""
        names = self.submod_to_stage_index
        if submod_name not in names:
            raise CaptureError(f"no stage is called {submod_name!r}; expected one of {', '.join(names)}")
        return names[submod_name]

    def find_dst_rank(self, user: object) -> int | None:
        """The stage that a user of a value belongs to; None for what is no stage."""
        name = str(getattr(user, "name", user))
        return self.get_stage_index_of_submod(name) if name.startswith(PP_SUBMOD_PREFIX) else None

    def _get_output_node(self) -> fx.Node:
        graph = self.submod.graph
        assert isinstance(graph, fx.Graph), "a captured stage has one"
        return graph.output_node()

    # -- driven by hand

    @cached_property
    def _received(self) -> tuple[tuple[int, int], ...]:
        """What this stage reads of others: the stage, and which of its outputs; in the order in which they are received."""
        here = [self.stage_index]
        return tuple((k, place) for k in range(self.stage_index) for place in self.routes.wanted_on(k, here))

    def _call_of(
        self, received: Sequence[Value], args: tuple[Value, ...], kwargs: dict[str, Value]
    ) -> tuple[tuple[Value, ...], dict[str, Value]]:
        (own,) = self.routes.bind([args], [kwargs], 1)
        values: dict[tuple[int | None, int], Value] = dict(zip(self._received, received, strict=True))
        return tuple(values.get(source, given) for source, given in zip(self.routes.sources, own, strict=True)), {}

    def _passes_on(self, producer: int) -> bool:
        return bool(self.routes.wanted_on(producer, range(self.stage_index + 1, self.num_stages)))

    def _sources(self, number: int) -> Sequence[tuple[int, int]]:
        return self._received

    def _create_act_send_info(self) -> dict[int, list[int | None]]:
        if self.is_last:
            return super()._create_act_send_info()
        wires = self.pipe_info.stage_outputs[self.stage_index]
        return {place: list(wire.stages) for place, wire in enumerate(wires)}

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        """What several stages read has the sum of what they send back."""
        arrived = iter(super()._retrieve_recv_grads(bwd_chunk_id))
        of_each = [islice(arrived, len(readers)) for readers in self.act_send_info.values()]
        return tuple(reduce(_null_coalesce_accumulate, grads, None) for grads in of_each)


def build_stage(
    stage_module: StageModule, stage_index: int, pipe_info: CoreInfo, device: torch.device | str, group: Group = None
) -> _PipelineStage:
    """A stage for a schedule, around a captured module that is moved to `device`.

    stage = build_stage(pipe.get_stage_module(0), 0, pipe.info(), "cpu")
    """
    return _PipelineStage(stage_module, stage_index, PipeInfo.of(pipe_info), device, group)


class Pipe(capture.Pipe):
    """A pipe that returns the leaves of the model's output as a tuple, as torch's does."""

    _info: PipeInfo

    def __init__(self, stages: Sequence[StageModule], info: CoreInfo) -> None:
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
            raise CaptureError("the exported program has no example inputs; use Pipe.from_tracing(model, example_args)")
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
