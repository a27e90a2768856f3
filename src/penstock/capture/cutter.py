"""The placed graph into one graph for each stage, and the wires between them.

cut = Cutter(placed, names, input_names=table.names, transmit=False).cut()
cut.pieces[1].program, cut.pieces[1].inputs, cut.pieces[1].outputs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from penstock.capture.arguments import model_values
from penstock.capture.export import FromConstant, FromInput, FromState
from penstock.capture.flat import REGION, SIZE, aten, body_module, is_size
from penstock.capture.place import EVERYWHERE, Placed
from penstock.capture.stage_graph import OperatorGraph, late, wrap_regions
from penstock.capture.stage_state import StateNames
from penstock.capture.wires import Guard, Wire, wire_of
from penstock.errors import CaptureError
from penstock.nest import LEAF, Kind, Nest, Value


@dataclass(frozen=True)
class StagePiece:
    """One stage: its graph and what goes in and out."""

    program: OperatorGraph
    inputs: tuple[Wire, ...]
    outputs: tuple[Wire, ...]  # of the last stage: the leaves of the model's output
    states: tuple[str, ...]  # parameters and buffers that it uses, by the names that it uses
    constants: dict[str, torch.Tensor]
    recipe: Nest = LEAF  # of the last stage: puts the model's output together
    fixed: tuple[tuple[int, object], ...] = ()  # of the last stage: leaves of the output that are always the same
    guards: tuple[Guard, ...] = ()  # what must be true of the sizes, of the whole model
    computed: tuple[int, ...] = field(
        init=False
    )  # places of the outputs that are computed in this graph; all, if none is

    def __post_init__(self) -> None:
        values: Any = self.program.graph.output_node().args[0]
        places = [place for place, value in enumerate(values) if value.op != "placeholder"]
        object.__setattr__(
            self, "computed", tuple(places or range(len(values)))
        )  # torch.compile reads no cached property

    def model_output(self, values: Sequence[object]) -> Value:
        """What the model returns, out of the outputs of the last stage."""
        if self.recipe.kind is Kind.LEAF and values:
            return values[0]
        leaves = list(values)
        for position, value in self.fixed:
            leaves.insert(position, value)
        return model_values.unflatten(self.recipe, leaves)


@dataclass(frozen=True)
class Cut:
    """The whole model, cut."""

    pieces: tuple[StagePiece, ...]
    placed: Placed


@dataclass
class _Needs:
    """What one stage must be given."""

    given: set[fx.Node] = field(default_factory=set)  # arguments of the model, and what other stages have
    sizes: set[fx.Node] = field(default_factory=set)
    own: list[fx.Node] = field(default_factory=list)


class Cutter:
    """Cuts one placed graph; `input_names` are the model's arguments, leaf by leaf."""

    def __init__(
        self, placed: Placed, names: StateNames, *, input_names: Sequence[str], transmit: bool, carry: bool = False
    ) -> None:
        self.placed = placed
        self.names = names
        self.input_names = input_names
        self.flat = placed.flat
        self.origins = placed.flat.traced.origins
        self.stage = placed.stage
        self.last = placed.num_stages - 1
        self.order = {n: i for i, n in enumerate([*self.origins, *self.flat.nodes])}
        self.leader = names.leaders(self.origins)
        self.owner = self._parameter_owners() if transmit else {}
        self.carry = carry  # whether later stages get the model's arguments from the first one
        self.needs = [self._needs(k) for k in range(placed.num_stages)]
        if carry:
            self.needs[0].given |= {
                n for needs in self.needs for n in needs.given if isinstance(self.origins.get(n), FromInput)
            }
        self._resolve_sizes()
        self.wires = self._wires()
        self.carried = {
            n: replace(wire, source=0, stages=wire.stages[1:])
            for n, wire in self.wires.items()
            if carry and wire.source is None and len(wire.stages) > 1
        }

    def cut(self) -> Cut:
        pieces = [self._piece(k) for k in range(self.placed.num_stages)]
        fixed = tuple((i, v) for i, v in enumerate(self.flat.traced.outputs) if not isinstance(v, fx.Node))
        pieces[-1] = replace(pieces[-1], recipe=self.flat.traced.recipe, fixed=fixed)
        return Cut(tuple(pieces), self.placed)

    def _parameter_owners(self) -> dict[fx.Node, int]:
        """For parameters that travel: the first stage that uses each of those which several stages use."""
        users: dict[fx.Node, set[int]] = {}
        for node in self.flat.nodes:
            for arg in node.all_input_nodes:
                origin = self.origins.get(arg)
                if isinstance(origin, FromState) and origin.parameter:
                    users.setdefault(self.leader[arg], set()).add(self.stage[node])
        return {node: min(stages) for node, stages in users.items() if len(stages) > 1}

    def _needs(self, k: int) -> _Needs:
        needs = _Needs()
        seen: set[fx.Node] = set()
        todo = [n for n in self.flat.nodes if self.stage[n] == k and not is_size(n)]
        if k == self.last:
            todo += [v for v in self.flat.traced.outputs if isinstance(v, fx.Node)]
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            leader = self.leader.get(node, node)
            if is_size(node):
                needs.sizes.add(node)
            elif self.stage.get(node) in (k, EVERYWHERE):
                needs.own.append(node)
                todo += node.all_input_nodes
            elif not isinstance(self.origins.get(node), FromState | FromConstant) or self.owner.get(leader, k) < k:
                needs.given.add(leader)
        needs.own.sort(key=self.order.__getitem__)
        return needs

    def _resolve_sizes(self) -> None:
        """Each stage reads sizes off tensors that it has; a size that none of them shows, and it cannot make, becomes a wire."""
        for k, needs in enumerate(self.needs):
            for node in needs.sizes:
                if not self._reachable(node, k) and self._size_home(node) != k:
                    needs.given.add(node)

    def _size_home(self, node: fx.Node) -> int:
        return next(k for k in range(len(self.needs)) if self._reachable(node, k, own=True))

    def _reachable(self, node: fx.Node, k: int, *, own: bool = False) -> bool:
        return (
            self._size_source(node, k) is not None
            or (not self._reads_tensor(node) and all(self._reachable(a, k, own=own) for a in node.all_input_nodes))
            or (own and self._reads_tensor(node) and self._is_here(node.all_input_nodes[0], k))
        )

    @staticmethod
    def _reads_tensor(node: fx.Node) -> bool:
        return bool(node.all_input_nodes) and not is_size(node.all_input_nodes[0])

    def _is_here(self, node: fx.Node, k: int) -> bool:
        if node in self.needs[k].given or isinstance(self.origins.get(node), FromState | FromConstant):
            return True
        return node not in self.origins and self.stage[node] in (k, EVERYWHERE)

    def _size_source(self, node: fx.Node, k: int) -> tuple[fx.Node, int] | None:
        """A tensor among the stage's inputs that shows the size, and in which dimension."""
        value = node.meta.get("val")
        if not isinstance(value, torch.SymInt):
            return None
        for given in sorted(self.needs[k].given, key=self.order.__getitem__):
            for dim, size in enumerate(getattr(given.meta.get("val"), "shape", ())):
                if isinstance(size, torch.SymInt) and size.node.expr == value.node.expr:
                    return given, dim
        return None

    def _wires(self) -> dict[fx.Node, Wire]:
        used: dict[fx.Node, list[int]] = {}
        for k, needs in enumerate(self.needs):
            for node in needs.given:
                used.setdefault(node, []).append(k)
        wires = {}
        for node, stages in sorted(used.items(), key=lambda item: self.order[item[0]]):
            origin = self.origins.get(node)
            if isinstance(origin, FromInput):
                wires[node] = wire_of(node, self.input_names[origin.index], source=None, stages=stages)
            elif isinstance(origin, FromState):
                wires[node] = wire_of(node, origin.name, source=self.owner[node], stages=stages)
            else:
                home = self._size_home(node) if is_size(node) else self.stage[node]
                wires[node] = wire_of(node, node.name, source=home, stages=stages)
        return wires

    def _wire(self, node: fx.Node, k: int) -> Wire:
        """On which a value comes to a stage."""
        return self.carried[node] if k > 0 and node in self.carried else self.wires[node]

    def _piece(self, k: int) -> StagePiece:
        needs = self.needs[k]
        given = sorted(needs.given, key=lambda n: (self._wire(n, k).source is not None, self.order[n]))
        builder = _Builder(self, k, given)
        for node in needs.own:
            builder.add(node)
        if k == self.last:
            leaves = [v for v in self.flat.traced.outputs if isinstance(v, fx.Node)]
            outputs = tuple(wire_of(v, v.name, source=k, stages=()) for v in leaves)
        else:
            made = {n: wire for n, wire in self.wires.items() if wire.source == k} | (self.carried if k == 0 else {})
            leaves, outputs = list(made), tuple(made.values())
        builder.graph.output(tuple(builder.value(n) for n in leaves))
        wrap_regions(builder.graph, builder.bodies)
        program = OperatorGraph(builder.graph, builder.bodies)
        inputs = tuple(self._wire(n, k) for n in given)
        return StagePiece(program, inputs, outputs, tuple(builder.states), builder.constants)


class _Builder:
    """Writes the graph of one stage."""

    def __init__(self, cutter: Cutter, k: int, given: Sequence[fx.Node]) -> None:
        self.cutter = cutter
        self.k = k
        self.graph = fx.Graph()
        self.bodies: dict[str, OperatorGraph] = {}
        self.states: dict[str, None] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.values: dict[fx.Node, fx.Node] = {}
        self.attributes: dict[str, fx.Node] = {}
        # what arrives is contiguous, even where it was not: a view of it may then need a copy
        rows = not all(cutter._wire(n, k).contiguous for n in given if cutter._wire(n, k).source is not None)
        self.relaxed: dict[object, Any] = {aten.view.default: aten.reshape.default} if rows else {}
        taken: set[str] = set()
        for node in given:
            name = identifier(cutter.wires[node].name)
            while name in taken:  # x["a"] beside an argument x_a
                name += "_"
            taken.add(name)
            self.values[node] = self.graph.placeholder(name)

    def add(self, node: fx.Node) -> None:
        body = body_module(node, self.cutter.flat.traced.root)
        if body is not None:
            name = f"_region_{len(self.bodies)}"
            self.bodies[name] = OperatorGraph.of(body)
            self.values[node] = self._attribute(name)
            return
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.value(n, user=node))
        made = self.graph.create_node(
            node.op, self.relaxed.get(node.target, late(node.target)), args, kwargs, node.name
        )
        made.meta["path"] = module_path(node)
        if REGION in node.meta:
            made.meta[REGION] = node.meta[REGION]
        self.values[node] = made

    def value(self, node: fx.Node, *, user: fx.Node | None = None) -> fx.Node:
        """The node of this graph that holds what `node` held in the whole one."""
        origin = self.cutter.origins.get(node)
        if isinstance(origin, FromState):
            canonical = self.cutter.leader[node]
            if canonical in self.values:
                return self.values[canonical]
            name = self.cutter.names.name_for(origin.name, "" if user is None else module_path(user))
            self.states[name] = None
            return self._attribute(name)
        if node in self.values:
            return self.values[node]
        if isinstance(origin, FromConstant):
            name = f"_constant_{identifier(origin.name)}"
            self.constants[name] = constant_value(origin)
            self.values[node] = self._attribute(name)
        elif is_size(node):
            self.values[node] = self._size(node)
        else:
            raise CaptureError(f"stage {self.k} uses {node.name}, which no stage gives it")
        return self.values[node]

    def _size(self, node: fx.Node) -> fx.Node:
        source = self.cutter._size_source(node, self.k)
        if source is not None:
            made = self.graph.call_function(aten.sym_size.int, (self.value(source[0]), source[1]))
        else:
            args = fx.map_arg(node.args, self.value)
            made = self.graph.create_node("call_function", node.target, args, dict(node.kwargs), node.name)
        made.meta[SIZE] = True
        return made

    def _attribute(self, name: str) -> fx.Node:
        if name not in self.attributes:
            self.attributes[name] = self.graph.create_node("get_attr", name)
        return self.attributes[name]


def module_path(node: fx.Node) -> str:
    """The module in whose forward the node was made, by its name in the user's model."""
    stack: dict[str, tuple[str, object]] = node.meta.get("nn_module_stack") or {}
    path, _ = next(reversed(stack.values()), ("", None))
    return path.removeprefix("model").removeprefix(".")


def identifier(name: str) -> str:
    text = "".join(c if c.isalnum() else "_" for c in name)
    return text if text.isidentifier() else f"_{text}"


def constant_value(origin: FromConstant) -> torch.Tensor:
    if not isinstance(origin.value, torch.Tensor):
        raise CaptureError(f"{origin.name} is a {type(origin.value).__name__}; only tensors can be put into a stage")
    if isinstance(origin.value, torch._subclasses.FakeTensor) or origin.value.is_meta:
        raise CaptureError(
            f"{origin.name} is a plain tensor attribute on the meta device, so its values are unknown; make it a "
            "buffer (self.register_buffer), so that it can be loaded by name"
        )
    return origin.value
