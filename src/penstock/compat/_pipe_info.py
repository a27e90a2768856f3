"""What everybody may know about a captured model, in torch's words: the graph in which each stage is one node.

pipe.info().graph.print_tabular()
"""

from __future__ import annotations

import operator
import re
from dataclasses import fields
from functools import cached_property

from torch import fx

from penstock import capture

NAME = "submod_pp"  # of a stage in that graph, before its number


def get_submod_name(stage_idx: int) -> str:
    """What torch calls a stage in its captured graph."""
    return f"{NAME}_{stage_idx}"


class PipeInfo(capture.PipeInfo):
    """Penstock's, and what programs read beside it."""

    @classmethod
    def of(cls, info: capture.PipeInfo) -> PipeInfo:
        return cls(**{field.name: getattr(info, field.name) for field in fields(info)})

    @property
    def has_loss_and_backward(self) -> bool:
        """Whether the model returns its own loss."""
        return self.has_loss

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
            node = graph.call_module(
                get_submod_name(stage), tuple(values[wire.name] for wire in self.stage_inputs[stage])
            )
            node.name = get_submod_name(stage)
            made = self.stage_outputs[stage]
            if stage == last:  # of the leaves of the output it returns those that it computes itself, or else all
                made = tuple(wire for wire in made if wire.name not in values) or made
            for place, wire in enumerate(made):
                values[wire.name] = node if len(made) == 1 else graph.call_function(operator.getitem, (node, place))
        graph.output(tuple(values[wire.name] for wire in self.stage_outputs[last]))
        return graph
