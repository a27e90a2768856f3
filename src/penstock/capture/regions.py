"""Regions that were opened for a cut, closed again inside each stage.

A node that stood in a region carries its tag. Neighbours with the same tag go into one body, called through the
region's operator (``no_grad``, autocast), as they were in the model.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from penstock.capture.flat import REGION, SIZE
from penstock.capture.program import Program


def wrap_regions(graph: fx.Graph, bodies: dict[str, Program]) -> None:
    """Close the regions of a stage's graph; the new bodies are added to `bodies`."""
    run: list[fx.Node] = []
    number: Any = None
    for node in list(graph.nodes):
        if run and REGION not in node.meta and (node.op == "get_attr" or SIZE in node.meta):
            if not any(arg in run for arg in node.all_input_nodes):
                run[0].prepend(node)
                continue
        tag = node.meta.get(REGION, ())
        here = tag[0][0] if tag else None
        if run and here != number:
            _wrap(graph, run, bodies)
            run = []
        if here is not None:
            run.append(node)
        number = here


def _wrap(graph: fx.Graph, run: list[fx.Node], bodies: dict[str, Program]) -> None:
    _, target, leading = run[0].meta[REGION][0]
    members = set(run)
    inner = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    inner_bodies: dict[str, Program] = {}
    outside = list(
        dict.fromkeys(a for node in run for a in node.all_input_nodes if a not in members and not _body(a, bodies))
    )
    for arg in outside:
        values[arg] = inner.placeholder(arg.name)
    for node in run:
        for arg in node.all_input_nodes:
            if _body(arg, bodies) and arg not in values:
                inner_bodies[str(arg.target)] = bodies[str(arg.target)]
                values[arg] = inner.create_node("get_attr", str(arg.target))
        made = inner.node_copy(node, lambda n: values[n])
        made.meta = {"path": node.meta.get("path", "")}
        rest = node.meta[REGION][1:]
        if rest:
            made.meta[REGION] = rest
        values[node] = made
    results = [node for node in run if any(user not in members for user in node.users)]
    inner.output(tuple(values[node] for node in results))
    wrap_regions(inner, inner_bodies)
    name = f"_region_{len(bodies)}"
    bodies[name] = Program(inner, inner_bodies)
    with graph.inserting_before(run[0]):
        body = graph.create_node("get_attr", name)
        call = graph.call_function(target, (*leading, body, *outside))
        for i, node in enumerate(results):
            part = graph.call_function(operator.getitem, (call, i))
            part.meta["path"] = node.meta.get("path", "")
            node.replace_all_uses_with(part, lambda user: user not in members)
    for node in reversed(run):
        graph.erase_node(node)


def _body(node: fx.Node, bodies: dict[str, Program]) -> bool:
    return node.op == "get_attr" and str(node.target) in bodies
