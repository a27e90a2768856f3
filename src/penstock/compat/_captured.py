"""A captured stage as programs drive it: `_PipelineStage` and `build_stage` of torch.distributed.pipelining.

pipe.info().graph.print_tabular()  # in torch's words: the graph in which each stage is one node
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cached_property, reduce
from itertools import islice

import torch
from torch import Tensor, fx

from penstock import capture
from penstock.capture.pipe import CapturedStage
from penstock.capture.stage_module import StageModule
from penstock.compat._backward import _null_coalesce_accumulate
from penstock.compat._infer import PipelineStage
from penstock.compat._metadata import Metas
from penstock.errors import CaptureError
from penstock.nest import Value
from penstock.stage.pipeline_stage import Group

NAME = "submod_pp"  # of a stage in that graph, before its number


def get_submod_name(stage_idx: int) -> str:
    """What torch calls a stage in its captured graph."""
    return f"{NAME}_{stage_idx}"


class PipeInfo(capture.PipeInfo):
    """Penstock's, and what programs read beside it."""

    @classmethod
    def of(cls, info: capture.PipeInfo) -> PipeInfo:
        return cls(**{field.name: getattr(info, field.name) for field in fields(info)})

    # Whether the model returns its own loss.
    has_loss_and_backward = cached_property[bool](lambda self: self.has_loss)

    @cached_property
    def graph(self) -> fx.Graph:
        """The stages as nodes, and the values that travel between them. It returns the leaves of the model's output."""
        graph, last = fx.Graph(), self.num_stages - 1
        values: dict[str, fx.Node] = {}
        taken: set[str] = set()
        for name in self.inputs.names:
            short = re.sub(r"\W+", "_", name).strip("_")
            while short in taken:
                short += "_"
            taken.add(short)
            values[name] = graph.placeholder(short)
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

    @property
    def submod_to_stage_index(self) -> dict[str, int]:
        return {get_submod_name(stage): stage for stage in range(self.num_stages)}

    def _move_submod_to_device(self) -> None:
        self.submod.to(self.device)

    def get_stage_index_of_submod(self, submod_name: str) -> int:
        """The stage of that name."""
        found = self.submod_to_stage_index.get(submod_name)
        if found is None:
            last = get_submod_name(self.num_stages - 1)
            raise CaptureError(f"no stage is called {submod_name!r}; expected {get_submod_name(0)} to {last}")
        return found

    def find_dst_rank(self, user: object) -> int | None:
        """The stage that a user of a value belongs to; None for what is no stage."""
        name = str(getattr(user, "name", user))
        return self.get_stage_index_of_submod(name) if name.startswith(NAME) else None

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

    def _from_before(self, outputs: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(outputs[place] for source, place in self._received if source == self.stage_index - 1)

    def _metas_from(self, heard: Mapping[int, Metas | None]) -> Metas | None:
        return tuple((heard[source] or ())[place] for source, place in self._received)

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
    stage_module: StageModule,
    stage_index: int,
    pipe_info: capture.PipeInfo,
    device: torch.device | str,
    group: Group = None,
) -> _PipelineStage:
    """A stage for a schedule, around a captured module that is moved to `device`.

    stage = build_stage(pipe.get_stage_module(0), 0, pipe.info(), "cpu")
    """
    return _PipelineStage(stage_module, stage_index, PipeInfo.of(pipe_info), device, group)
