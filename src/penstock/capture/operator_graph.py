"""A graph that can be run, printed, saved and moved to another device.

    program = OperatorGraph(graph, bodies={})
    program.function("self")(module, x)         # runs with the attributes of `module`
    pickle.loads(pickle.dumps(program))         # equal

Nothing of torch's tracing (fake tensors, symbolic sizes) is kept.
"""

from __future__ import annotations

import copy
import linecache
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from penstock.capture.flat import REGION, SIZE, aten


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


def addmm(bias: Tensor, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if beta == 1 and alpha == 1:
        return torch.addmm(bias, x, weight)
    return torch.addmm(bias, x, weight, beta=beta, alpha=alpha)


_LATE: dict[object, object] = {aten.linear.default: linear, aten.addmm.default: addmm}


class Ref(str):
    """The name of another node that is used, in a saved graph."""

    __slots__ = ()


@dataclass(frozen=True)
class OperatorGraph:
    """A graph and the bodies of its regions, by the attribute names that the graph uses for them."""

    graph: fx.Graph
    bodies: dict[str, OperatorGraph] = field(default_factory=dict)

    @staticmethod
    def of(module: fx.GraphModule) -> OperatorGraph:
        """The program of the body of a region, without what tracing left on it."""

        def clean(node: fx.Node) -> None:
            node.meta, node.type, node.target = {}, None, late(node.target)

        names = [str(node.target) for node in module.graph.nodes if node.op == "get_attr"]
        bodies = {name: OperatorGraph.of(getattr(module, name)) for name in names}
        return OperatorGraph(_copy(module.graph, clean), bodies)

    def module(self) -> fx.GraphModule:
        """For use as the body of a region."""
        return fx.GraphModule({name: body.module() for name, body in self.bodies.items()}, self.graph)

    def function(self, written: Callable[[str], str]) -> Callable[..., object]:
        """The graph as a Python function ``forward(self, *inputs)``; `written` is how it reaches an attribute."""
        reached: list[str] = []

        def reach(node: fx.Node) -> None:
            if node.op == "get_attr":
                reached.append(written(str(node.target)))
                node.target = f"_reached_{len(reached) - 1}_"

        code = _copy(self.graph, reach).python_code("self")
        source = re.sub(r"self\._reached_(\d+)_", lambda found: reached[int(found[1])], code.src)
        name = f"<penstock stage {id(self):x}>"
        space = dict(code.globals)
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        exec(compile(source, name, "exec"), space)
        return space["forward"]  # type: ignore[no-any-return]

    def moved(self, old: torch.device, new: torch.device) -> OperatorGraph:
        """The same program, with another device wherever it names `old`."""

        def replaced(value: object) -> Any:
            return new if isinstance(value, torch.device) and value == old else value

        def move(node: fx.Node) -> None:
            node.args = fx.node.map_aggregate(node.args, replaced)
            node.kwargs = fx.node.map_aggregate(node.kwargs, replaced)

        bodies = {name: body.moved(old, new) for name, body in self.bodies.items()}
        return OperatorGraph(_copy(self.graph, move), bodies)

    def __reduce__(self) -> tuple[object, ...]:
        refer: Any = lambda node: Ref(node.name)  # noqa: E731  # a Ref is no argument of a graph yet
        nodes = [
            (n.op, n.name, _saved(n.target), fx.map_arg((n.args, n.kwargs), refer), n.meta.get("path", ""))
            for n in self.graph.nodes
        ]
        return _loaded, (nodes, self.bodies)

    def __deepcopy__(self, memo: dict[int, object]) -> OperatorGraph:
        return self


def _loaded(nodes: Sequence[Any], bodies: dict[str, OperatorGraph]) -> OperatorGraph:
    graph = fx.Graph()
    values: dict[str, fx.Node] = {}
    for op, name, target, given, path in nodes:
        if op == "call_function" and isinstance(target, str):
            target = operator.attrgetter(target)(torch.ops)
        args, kwargs = fx.node.map_aggregate(given, lambda v: values[v] if isinstance(v, Ref) else v)
        values[name] = graph.create_node(op, target, args, kwargs, name)
        values[name].meta["path"] = path
    return OperatorGraph(graph, bodies)


def late(target: object) -> Any:
    """Operators that a split backward may replace are looked up at each call."""
    return _LATE.get(target, target) if isinstance(target, torch._ops.OpOverload) else target


def _saved(target: object) -> object:
    """What stands for the target of a node in a saved graph: for an operator of torch its name in `torch.ops`."""
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.name()}"
    return str(target) if isinstance(target, torch._ops.OpOverload) else target


def _copy(graph: fx.Graph, change: Callable[[fx.Node], None]) -> fx.Graph:
    """Another graph, with each node changed."""
    made = copy.deepcopy(graph)
    for node in made.nodes:
        change(node)
    return made


def wrap_regions(graph: fx.Graph, bodies: dict[str, OperatorGraph]) -> None:
    """Close the regions that were opened for a cut, inside one stage; the new bodies are added to `bodies`.

    A node that stood in a region carries its tag. Neighbours with the same tag go into one body, called through the region's
    operator (``no_grad``, autocast), as they were in the model.
    """
    run: list[fx.Node] = []
    number: object = None
    for node in list(graph.nodes):
        if run and not node.meta.get(REGION) and (node.op == "get_attr" or SIZE in node.meta):
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


def _wrap(graph: fx.Graph, run: list[fx.Node], bodies: dict[str, OperatorGraph]) -> None:
    _, target, leading = run[0].meta[REGION][0]
    members = set(run)
    inner = fx.Graph()
    used = dict.fromkeys(arg for node in run for arg in node.all_input_nodes if arg not in members)
    inside = {arg: str(arg.target) for arg in used if arg.op == "get_attr" and str(arg.target) in bodies}
    outside = [arg for arg in used if arg not in inside]
    values = {arg: inner.placeholder(arg.name) for arg in outside}
    values |= {arg: inner.create_node("get_attr", name) for arg, name in inside.items()}
    inner_bodies = {name: bodies[name] for name in inside.values()}
    for node in run:
        made = inner.node_copy(node, lambda n: values[n])
        made.meta = {"path": node.meta.get("path", ""), REGION: node.meta[REGION][1:]}
        values[node] = made
    results = [node for node in run if any(user not in members for user in node.users)]
    inner.output(tuple(values[node] for node in results))
    wrap_regions(inner, inner_bodies)
    name = f"_region_{len(bodies)}"
    bodies[name] = OperatorGraph(inner, inner_bodies)
    with graph.inserting_before(run[0]):
        body = graph.create_node("get_attr", name)
        call = graph.call_function(target, (*leading, body, *outside))
        for i, node in enumerate(results):
            part = graph.call_function(operator.getitem, (call, i))
            part.meta["path"] = node.meta.get("path", "")
            node.replace_all_uses_with(part, lambda user: user not in members)
    for node in reversed(run):
        graph.erase_node(node)
