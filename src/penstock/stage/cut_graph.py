"""A backward graph of AOTAutograd, cut in two: what the gradients of inputs need, and the rest.

    parts = split_backward(graph, inputs, weights=frozenset({0, 1}), compiler=compile_one)
    with collecting() as work:
        parts.run(saved_and_gradients)     # the gradients of the inputs; those of parameters 0 and 1 are left in `work`
    accumulate_graphs(work)                # now they are in `.grad`

While somebody is `collecting`, the first part (I) runs and the second (W) is handed over as a `GraphWork`, with what it needs:
values that the first part computed on its way, and saved activations. Otherwise both run one after the other.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from penstock.nest import Value
from penstock.stage.buffers import memory_of
from penstock.stage.engine import run_engine

Compiled = Callable[[list[Value]], Sequence[Value]]
"""A compiled graph: takes a list of its inputs, which it empties, and returns its outputs."""
Compile = Callable[[fx.GraphModule, Sequence[Value]], Compiled]
"""Compiles one part of a backward graph for inputs such as these."""


class GraphWork(NamedTuple):
    """The weight part of one backward: computes the gradients of `parameters` from `kept`."""

    run: Compiled
    kept: list[Value]
    parameters: Sequence[Tensor]

    def by_parameter(self) -> tuple[list[Tensor], list[Tensor]]:
        """Parameters that are trained, and a gradient for each of them."""
        found = zip(self.parameters, self.run(self.kept), strict=True)
        pairs = [(p, g) for p, g in found if g is not None and p.requires_grad]
        return [parameter for parameter, _ in pairs], [grad for _, grad in pairs]

    def apart(self) -> list[Value]:
        """A gradient for each parameter, in memory of its own: autograd keeps what it is given, and adds to it in place."""
        known = [memory_of(value) for value in self.kept]  # which `run` empties
        values = list(self.run(self.kept))
        known += map(memory_of, values)
        for place, value in enumerate(values):
            if value is not None and known.count(memory_of(value)) > 1:
                values[place] = value.clone()
        return values


class _Here(threading.local):
    work: list[GraphWork] | None = None  # where backwards leave their weight part
    # The parameters (by `id`) whose graphs give them their gradients by way of autograd; True: all graphs do.
    in_one_piece: Mapping[int, Tensor] | bool = False
    also: tuple[Callable[[], object], ...] = ()  # what else a call of a graph does


here = _Here()
NOTE = "penstock.stage.compiled"  # under this key autograd's node of a call knows its parameters
_C: Any = torch._C


class collecting:
    """While this is open, backwards that run in this thread, or in engine threads on its behalf, leave their weight part."""

    __slots__ = ("previous",)

    def __enter__(self) -> list[GraphWork]:
        work: list[GraphWork] = []
        self.previous, here.work = here.work, work
        _C._stash_obj_in_tls(NOTE, work)
        return work

    def __exit__(self, *_: object) -> None:
        here.work = self.previous
        _C._stash_obj_in_tls(NOTE, self.previous)


class in_one_piece:
    """While this is open, graphs that are called in this thread and have one of these `parameters` (True: all graphs) give
    gradients to theirs by way of autograd, together with other code that uses the same ones: all hooks fire once."""

    __slots__ = ("parameters",)

    def __init__(self, parameters: Mapping[int, Tensor] | bool = True) -> None:
        self.parameters = parameters

    def __enter__(self) -> None:
        here.in_one_piece = self.parameters

    def __exit__(self, *_: object) -> None:
        here.in_one_piece = False


def is_in_one_piece(parameters: Sequence[Value]) -> bool:
    """Whether a graph that is called now, with these parameters, gives them their gradients by way of autograd."""
    chosen = here.in_one_piece
    if isinstance(chosen, bool):
        return chosen
    return any(id(parameter) in chosen for parameter in parameters)


def hand_over(work: GraphWork) -> None:
    """Leave the weight part of a backward to whoever collects them; if nobody does, it is done at once."""
    collected = here.work
    if collected is None and _C._is_key_in_tls(NOTE):  # in a thread of the engine
        collected = _C._get_obj_in_tls(NOTE)
    (accumulate_graphs if collected is None else collected.extend)([work])


def accumulate_graphs(work: list[GraphWork]) -> None:
    """Run the weight parts; the engine accumulates each parameter once, with all its hooks."""
    roots, grads = weight_gradients(work)
    if roots:
        run_engine(tuple(roots), tuple(grads))


def weight_gradients(work: list[GraphWork]) -> tuple[list[Tensor], list[Tensor]]:
    """Run the weight parts: parameters, and a gradient for each of them."""
    roots: list[Tensor] = []
    grads: list[Tensor] = []
    with torch.no_grad():
        while work:
            one = work.pop()
            parameters, found = one.by_parameter()
            roots += parameters
            grads += found
    return roots, grads


def split_backward(
    graph: fx.GraphModule, inputs: Sequence[object], *, weights: frozenset[int], compiler: Compile
) -> BackwardParts | Compiled:
    """Cut a backward graph of AOTAutograd in two, and compile both parts; one that cannot be cut is compiled as it is.

    `weights` are the places, among the inputs of the forward, of the parameters that need a gradient.
    """
    (output,) = graph.graph.find_nodes(op="output")
    grads: list[fx.Node | None] = list(output.args[0])  # nodes, and None for inputs that need no gradient
    sources = [_source(description) for description in output.meta.get("desc", ())]
    waiting = [place for place, source in enumerate(sources) if source in weights]
    ends = [grad for place in waiting if (grad := grads[place]) is not None]
    if not ends or _has_effects(graph.graph):
        return compiler(graph, inputs)
    first = _closed(
        graph.graph, [grad for place, grad in enumerate(grads) if place not in waiting and grad is not None]
    )
    given = graph.graph.find_nodes(op="placeholder")
    second = _ancestors(ends) - first - set(given)
    crossing = [
        node
        for node in graph.graph.nodes
        if node not in second and (node in ends or any(user in second for user in node.users))
    ]
    passed, made = ([node for node in crossing if (node in given) is wanted] for wanted in (True, False))
    places = [place for place in range(len(grads)) if place not in waiting]
    early = [grads[place] for place in places]
    reads = [node for node in given if node in first]
    values = dict(zip(given, inputs, strict=True))
    compiled = None
    if made or any(grad is not None for grad in early):
        part = _extracted(graph, first, reads, [*early, *made])
        compiled = called_shortly(compiler(part, [values[node] for node in reads]))
    kept = passed + made
    part = _extracted(graph, second, kept, [grads[place] for place in waiting])
    return BackwardParts(
        sources,
        places=places,
        waiting=waiting,
        reads=list(map(given.index, reads)),
        passes=list(map(given.index, passed)),
        first=compiled,
        second=called_shortly(compiler(part, [values.get(node, node.meta["val"]) for node in kept])),
    )


@dataclass
class BackwardParts:
    """A backward in two parts."""

    sources: list[int | None]  # of each gradient: the place of its input among those of the forward
    places: list[int]  # which of the gradients the first part gives
    waiting: list[int]  # and which the second, those of parameters
    reads: list[int]  # which inputs the first part reads
    passes: list[int]  # which inputs are kept for the second
    first: Compiled | None  # None: it would give nothing
    second: Compiled
    shared: list[int] | None = None  # places of gradients in memory of one another or of `kept`, once it ran

    def inputs(self, given: list[object]) -> tuple[list[Value], list[Value]]:
        """The first part: the gradients, without those of parameters, and what is kept for the second. Empties `given`."""
        kept = [given[place] for place in self.passes]
        found: list[Value] = [None] * len(self.sources)
        if self.first is None:
            given.clear()
            return found, kept
        reads = [given[place] for place in self.reads]
        given.clear()
        values = self.first(reads)
        for place, value in zip(self.places, values, strict=False):
            found[place] = value
        kept += values[len(self.places) :]
        if self.shared is None:
            memory = [memory_of(value) for value in (*found, *kept)]
            self.shared = [place for place in self.places if memory[place] and memory.count(memory[place]) > 1]
        for place in self.shared:  # whoever takes a gradient may add to it in place
            found[place] = found[place].clone()
        return found, kept

    def run(self, given: list[object]) -> list[Value]:
        """As AOTAutograd calls a backward in one piece."""
        found, kept = self.inputs(given)
        node = _C._current_autograd_node()
        parameters = None if node is None else node.metadata.get(NOTE)
        if parameters is None:  # it was called with the parameters themselves
            work = GraphWork(self.second, kept, ())
            for place, value in zip(self.waiting, work.apart(), strict=True):
                found[place] = value
        else:
            hand_over(GraphWork(self.second, kept, parameters))
        return found

    def boxed(self) -> Compiled:
        """Marked as a function that takes a list and empties it; torch._dynamo sees that only of a plain function."""

        def boxed(given: list[object]) -> Sequence[object]:
            return self.run(given)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed


def called_shortly(compiled: Compiled) -> Compiled:
    """A graph of inductor's, called without its bookkeeping, which costs as much as a small kernel: that is for its first call,
    and for the profiler."""
    graph: Any = compiled
    profiler: Any = torch.autograd.profiler
    called = False

    def run(given: list[object]) -> Sequence[Value]:
        nonlocal called
        if called and not profiler._is_profiler_enabled:
            return graph.current_callable(given)  # type: ignore[no-any-return]
        called = True
        return graph(given)  # type: ignore[no-any-return]

    return run if hasattr(graph, "current_callable") else compiled


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
    """What belongs to the first part: all that its ends need, the pieces of values that it computes anyway, and whatever
    draws random numbers, so that they are drawn in the same order as in a backward in one piece."""
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
