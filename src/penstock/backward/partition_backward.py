"""A backward graph of AOTAutograd, partitioned into an input-gradient graph (I) and a weight-gradient graph (W)."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx


@dataclass
class BackwardPartition:
    """Two graphs that together compute what the backward graph does."""

    input_graph: fx.GraphModule | None  # None: there are no gradients of inputs to compute
    weight_graph: fx.GraphModule
    num_grads: int  # outputs of the backward graph
    places: list[int]  # those that the input-gradient graph returns; after them it returns what W reads of its results
    waiting: list[int]  # those that the weight-gradient graph returns
    reads: list[int]  # inputs of the backward graph that the input-gradient graph reads
    passes: list[int]  # those that the weight-gradient graph reads, before the results of the input-gradient graph
    num_saved: int  # inputs that the forward saved; the gradients of its outputs are the rest
    made: list[object]  # fake tensors: results of the input-gradient graph that W reads


def partition_backward(graph: fx.GraphModule, weights: frozenset[int]) -> BackwardPartition | None:
    """Partition a backward graph; None if it cannot be partitioned, or has no gradient of these inputs of the forward.

    `weights` are the places, among the inputs of the forward, of the parameters that need a gradient.
    """
    (output,) = graph.graph.find_nodes(op="output")
    grads: list[fx.Node | None] = list(output.args[0])  # None for inputs that need no gradient
    sources = [_source(description) for description in output.meta.get("desc", ())]
    waiting = [place for place, source in enumerate(sources) if source in weights]
    ends = [grad for place in waiting if (grad := grads[place]) is not None]
    if not ends or _has_effects(graph.graph):
        return None
    places = [place for place in range(len(grads)) if place not in waiting]
    early = [grads[place] for place in places]
    first = _closed(graph.graph, [grad for grad in early if grad is not None])
    given = graph.graph.find_nodes(op="placeholder")
    second = _ancestors(ends) - first - set(given)
    crossing = [
        node for node in graph.graph.nodes if node not in second and (node in ends or not second.isdisjoint(node.users))
    ]
    passed = [node for node in crossing if node in given]
    made = [node for node in crossing if node not in given]
    reads = [node for node in given if node in first]
    input_graph = None
    if made or any(grad is not None for grad in early):
        input_graph = _extracted(graph, first, reads, [*early, *made])
    return BackwardPartition(
        input_graph,
        _extracted(graph, second, passed + made, [grads[place] for place in waiting]),
        num_grads=len(grads),
        places=places,
        waiting=waiting,
        reads=list(map(given.index, reads)),
        passes=list(map(given.index, passed)),
        num_saved=sum(not node.name.startswith("tangents") for node in given),
        made=[node.meta["val"] for node in made],
    )


def _source(description: object) -> int | None:
    """The place of the forward's input of which this output of a backward graph is the gradient."""
    return getattr(getattr(description, "grad_of", None), "idx", None)


def _has_effects(graph: fx.Graph) -> bool:
    """Whether the graph does more than compute its outputs: such a backward stays in one piece."""
    return any(
        node.op == "call_function"
        and (getattr(getattr(node.target, "_schema", None), "is_mutable", False) or not node.users)
        for node in graph.nodes
    )


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes, and all that they are computed from."""
    stack = list(nodes)
    found: set[fx.Node] = set(stack)
    while stack:
        for node in stack.pop().all_input_nodes:
            if node not in found:
                found.add(node)
                stack.append(node)
    return found


def _closed(graph: fx.Graph, ends: list[fx.Node]) -> set[fx.Node]:
    """All that `ends` need, the pieces of values that are computed anyway, and whatever draws random numbers, so that they are
    drawn in the same order as in a backward in one piece."""
    random = [node for node in graph.nodes if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())]
    found = _ancestors([*ends, *random])
    for node in graph.nodes:
        if node.target is operator.getitem and node.args[0] in found:
            found.add(node)
    return found


def _extracted(
    graph: fx.GraphModule, nodes: set[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node | None]
) -> fx.GraphModule:
    """The part of a graph that computes `outputs` from `inputs` with the given nodes."""
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        # A name of its own, since inductor finds compiled graphs by their code: one that may overwrite its inputs, which an
        # equal backward in one piece does, must not be taken for this one.
        copies[node] = part.placeholder(f"split_{node.name}")
        copies[node].meta = dict(node.meta)
    for node in graph.graph.nodes:
        if node in nodes and node not in copies:
            copies[node] = part.node_copy(node, copies.__getitem__)
    end = part.output([None if node is None else copies[node] for node in outputs])
    (old,) = graph.graph.find_nodes(op="output")
    end.meta = {key: value for key, value in old.meta.items() if key not in ("desc", "user_visible_output_idxs")}
    end.meta["user_visible_output_idxs"] = []
    part.eliminate_dead_code()
    part.lint()
    return fx.GraphModule(graph, part)
