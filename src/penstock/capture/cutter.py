"""The placed graph into one graph for each stage, and the wires between them.

cut = Cutter(placed, names, transmit=False).cut()
cut.pieces[1].program, cut.pieces[1].inputs, cut.pieces[1].outputs
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from penstock.capture.export import FromConstant, FromState, has_no_data
from penstock.capture.flat import REGION, SIZE, aten, body_module, is_size
from penstock.capture.operator_graph import OperatorGraph, late, wrap_regions
from penstock.capture.place import EVERYWHERE, Placed
from penstock.capture.stage_state import StateNames
from penstock.capture.wires import Guard, Wire, wire_of
from penstock.errors import CaptureError
from penstock.nest import Nest


@dataclass(frozen=True)
class StagePiece:
    """One stage: its graph and what goes in and out."""

    program: OperatorGraph
    inputs: tuple[Wire, ...]
    outputs: tuple[Wire, ...]  # of the last stage: the leaves of the model's output
    states: tuple[str, ...]  # parameters and buffers that it uses, by the names that it uses
    constants: dict[str, torch.Tensor]
    recipe: Nest  # puts the model's output together, out of the outputs of the last stage
    guards: tuple[Guard, ...]  # what must be true of the sizes, of the whole model
    computed: tuple[int, ...]  # places of the outputs that are computed in this graph; all, if none is


class Cut(NamedTuple):
    """The whole model, cut."""

    pieces: tuple[StagePiece, ...]
    placed: Placed


class Cutter:
    """Cuts one placed graph."""

    def __init__(self, placed: Placed, names: StateNames, *, transmit: bool, carry: bool = False) -> None:
        self.placed = placed
        self.names = names
        self.flat = placed.flat
        self.origins = placed.flat.origins
        self.taken = {origin.name for origin in self.origins.values()}
        self.order = {n: i for i, n in enumerate([*self.origins, *self.flat.nodes])}
        # For each placeholder of a parameter or buffer, the one that stands for all names of the same tensor.
        leaders: dict[str, fx.Node] = {}
        states = ((node, names.first[o.name]) for node, o in self.origins.items() if isinstance(o, FromState))
        self.leader = {node: leaders.setdefault(name, node) for node, name in states}
        self.owner = self._parameter_owners() if transmit else {}
        self.carry = carry  # whether later stages get the model's arguments from the first one
        self.parts = [_Part(self, k) for k in range(placed.num_stages)]
        if carry:
            self.parts[0].given |= {n for n in self.flat.inputs if any(n in part.given for part in self.parts)}
        for part in self.parts:
            part.given |= {size for size in part.sizes if not part.knows(size)}
        self.wires = self._wires()

    def cut(self, guards: tuple[Guard, ...] = ()) -> Cut:
        return Cut(tuple(part.piece(guards) for part in self.parts), self.placed)

    def _parameter_owners(self) -> dict[fx.Node, int]:
        """For parameters that travel: the first stage that uses each of those which several stages use."""
        users: defaultdict[fx.Node, set[int]] = defaultdict(set)
        for node in self.flat.parameters:
            users[self.leader[node]] |= {self.placed.stage[user] for user in node.users if user in self.placed.stage}
        return {node: min(stages) for node, stages in users.items() if len(stages) > 1}

    def _wires(self) -> dict[fx.Node, Wire]:
        wires = {}
        for node in sorted({node for part in self.parts for node in part.given}, key=self.order.__getitem__):
            source = self.placed.stage.get(node, self.owner.get(node))  # None for an argument of the model
            if is_size(node):
                source = next(part.k for part in self.parts if part.knows(node))
            stages = [part.k for part in self.parts if node in part.given]
            wires[node] = wire_of(node, self.name_of(node), source=source, stages=stages)
        return wires

    def name_of(self, node: fx.Node) -> str:
        """What the wire of a value is called: an argument, parameter or buffer as the user calls it."""
        if node in self.origins:
            return self.origins[node].name
        return f"value {node.name}" if node.name in self.taken else node.name

    def wire(self, node: fx.Node, k: int) -> Wire:
        """On which a value comes to a stage."""
        wire = self.wires[node]
        return replace(wire, source=0, stages=wire.stages[1:]) if self.carry and k and wire.source is None else wire

    def sent(self, k: int) -> dict[fx.Node, Wire]:
        """What a stage hands on to later ones; arguments of the model come last."""
        later = {n: self.wire(n, k + 1) for n in sorted(self.wires, key=lambda n: self.wires[n].source is None)}
        return {n: wire for n, wire in later.items() if wire.source == k and wire.stages}


class _Part:
    """One stage of a placed graph: what it must be given, and then its own graph."""

    def __init__(self, cutter: Cutter, k: int) -> None:
        self.cutter = cutter
        self.k = k
        self.given: set[fx.Node] = set()  # arguments of the model, and what other stages have
        self.sizes: set[fx.Node] = set()
        self.own: dict[fx.Node, None] = {}  # what it computes, in order
        self.graph = fx.Graph()
        self.bodies: dict[str, OperatorGraph] = {}
        self.states: dict[str, None] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.values: dict[fx.Node | str, fx.Node] = {}  # of the whole graph, and attributes by their names
        self.outputs = cutter.flat.outputs if k == cutter.placed.num_stages - 1 else []
        self._find_needs(cutter.placed.stage)

    def _find_needs(self, stage: Mapping[fx.Node, int]) -> None:
        seen: set[fx.Node] = set()
        todo = [*self.outputs, *(n for n in self.cutter.flat.nodes if stage[n] == self.k and not is_size(n))]
        own: list[fx.Node] = []
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            leader, origin = self.cutter.leader.get(node, node), self.cutter.origins.get(node)
            if is_size(node):
                self.sizes.add(node)
            elif stage.get(node) in (self.k, EVERYWHERE):
                own.append(node)
                todo += node.all_input_nodes
            elif not isinstance(origin, FromState | FromConstant) or self.cutter.owner.get(leader, self.k) < self.k:
                self.given.add(leader)
        self.own = dict.fromkeys(sorted(own, key=self.cutter.order.__getitem__))

    def knows(self, size: fx.Node) -> bool:
        """Whether this stage can tell a size: by a tensor that it has, or out of other sizes. Else the size becomes a wire."""
        if self._shown(size) is not None:
            return True
        sent = self.cutter.carry and self.k > 0  # and contiguous, so that its strides may be others
        arguments = () if sent else self.given & self.cutter.origins.keys()
        return all(self.knows(a) if is_size(a) else a in self.own or a in arguments for a in size.all_input_nodes)

    def _shown(self, size: fx.Node) -> tuple[fx.Node, int] | None:
        """A tensor among the stage's inputs that shows the size, and in which dimension."""
        value = size.meta.get("val")
        if not isinstance(value, torch.SymInt):
            return None
        for given in sorted(self.given, key=self.cutter.order.__getitem__):
            for dim, other in enumerate(getattr(given.meta.get("val"), "shape", ())):
                if isinstance(other, torch.SymInt) and other.node.expr == value.node.expr:
                    return given, dim
        return None

    def piece(self, guards: tuple[Guard, ...]) -> StagePiece:
        wires = {n: self.cutter.wire(n, self.k) for n in sorted(self.given, key=self.cutter.order.__getitem__)}
        wires = dict(sorted(wires.items(), key=lambda item: item[1].source is not None))
        for node, wire in wires.items():
            made = self.values[node] = self.graph.create_node("placeholder", "", name=wire.name)
            made.target = made.name  # in which the graph put what makes it an identifier, and one of its own
        # what arrives is contiguous, even where it was not: a view of it may then need a copy
        relaxed = not all(wire.contiguous for wire in wires.values() if wire.source is not None)
        for node in self.own:
            self._add(node, {aten.view.default: aten.reshape.default} if relaxed else {})
        sent = self.cutter.sent(self.k)
        returned = (wire_of(n, self.cutter.name_of(n), source=self.k, stages=()) for n in self.outputs)
        values = tuple(map(self._value, (*self.outputs, *sent)))
        self.graph.output(values)
        wrap_regions(self.graph, self.bodies)
        program = OperatorGraph(self.graph, self.bodies)
        inputs, outputs, states = tuple(wires.values()), (*returned, *sent.values()), tuple(self.states)
        computed = tuple(place for place, value in enumerate(values) if value.op != "placeholder")
        recipe, every = self.cutter.flat.recipe, tuple(range(len(values)))
        return StagePiece(program, inputs, outputs, states, self.constants, recipe, guards, computed or every)

    def _add(self, node: fx.Node, relaxed: Mapping[object, Any]) -> None:
        body = body_module(node, self.cutter.flat.root)
        if body is not None:
            name = f"_region_{len(self.bodies)}"
            self.bodies[name] = OperatorGraph.of(body)
            self.values[node] = self._attribute(name)
            return
        path = module_path(node)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self._value(n, path))
        target = relaxed.get(node.target, late(node.target))
        made = self.values[node] = self.graph.create_node(node.op, target, args, kwargs, node.name)
        made.meta["path"] = path
        if REGION in node.meta:
            made.meta[REGION] = node.meta[REGION]

    def _value(self, node: fx.Node, path: str = "") -> fx.Node:
        """The node of this graph that holds what `node` held in the whole one; `path` is the module that uses it."""
        origin, node = self.cutter.origins.get(node), self.cutter.leader.get(node, node)
        if node in self.values:
            return self.values[node]
        if isinstance(origin, FromState):  # under a name of the user's own, which may differ from one use to the next
            name = self.cutter.names.name_for(origin.name, path)
            self.states[name] = None
            return self._attribute(name)
        if isinstance(origin, FromConstant):
            if has_no_data(origin.value):
                raise CaptureError(
                    f"{origin.name} is a plain tensor attribute on the meta device, so its values are unknown; make it a "
                    "buffer (self.register_buffer), so that it can be loaded by name"
                )
            name = f"_constant_{len(self.constants)}"
            self.constants[name] = origin.value
            self.values[node] = self._attribute(name)
        elif is_size(node):
            self.values[node] = self._size(node)
        else:
            raise CaptureError(f"stage {self.k} uses {node.name}, which no stage gives it")
        return self.values[node]

    def _size(self, node: fx.Node) -> fx.Node:
        shown = self._shown(node)
        target, args = (node.target, node.args) if shown is None else (aten.sym_size.int, shown)
        made = self.graph.create_node("call_function", target, fx.map_arg(args, self._value), dict(node.kwargs))
        made.meta[SIZE] = True
        return made

    def _attribute(self, name: str) -> fx.Node:
        if name not in self.values:
            self.values[name] = self.graph.create_node("get_attr", name)
        return self.values[name]


def module_path(node: fx.Node) -> str:
    """The module in whose forward the node was made, by its name in the user's model."""
    stack: dict[str, tuple[str, object]] = node.meta.get("nn_module_stack") or {}
    path, _ = next(reversed(stack.values()), ("", None))
    return path.removeprefix("model").removeprefix(".")
