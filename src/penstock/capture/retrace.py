"""Tracing and cutting a model, as often as needed: now in its mode, later in the other one.

retracer.piece(0, (False, frozenset()))               # stage 0 in evaluation, traced when first asked for
retracer.piece(0, (True, frozenset({("s28", 1)})))     # in training, for a batch of one row
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import fx, nn

from penstock.capture.cutter import Cut, Cutter, StagePiece, module_path
from penstock.capture.export import Example, FromConstant, Traced, trace, with_second_way
from penstock.capture.flat import flatten, is_size
from penstock.capture.marks import Mark, Points
from penstock.capture.place import EVERYWHERE, Placed, place
from penstock.capture.stage_state import StateNames
from penstock.capture.wires import Fixed, Guard, Key, Wire, same_wires, size_of, where, where_shapes_differ
from penstock.errors import CaptureError
from penstock.nest import Value
from penstock.stage.buffers import modes_of

Choose = Callable[[Traced], Sequence[int] | None]  # positions before which to cut; None: at the marks
Kinds = Sequence[tuple[str, str]]  # of each operator of a trace: its module, and what it does there


def _numbered(kinds: Kinds) -> list[tuple[object, ...]]:
    counts: defaultdict[tuple[str, str], count[int]] = defaultdict(count)
    return [(kind, next(counts[kind])) for kind in kinds]


def found_again(places: Sequence[int], old: Kinds, new: Kinds) -> Iterator[int]:
    """Where in another trace each of these operators is, though a mode or a size may have more or fewer of them; for one that has
    no work there, the next that has. Of a kind that both traces have as often, numbers tell; others are found from these."""
    before, now = Counter(old), Counter(new)
    numbers, there = _numbered(old), {key: at for at, key in enumerate(_numbered(new))}
    for wanted in places:
        sure = next((at for at in range(wanted, len(old)) if before[old[at]] == now[old[at]]), None)
        at, found = (len(old), len(new)) if sure is None else (sure, there[numbers[sure]])
        while at > wanted and found and old[at - 1] == new[found - 1]:
            at, found = at - 1, found - 1
        yield found


@dataclass
class Retracer:
    """All that is needed to trace the model again; holds none of its data."""

    skeleton: nn.Module
    example: Example  # its leaves are on the meta device
    fall_back: bool
    points: Points
    names: StateNames
    transmit: bool = False
    carry: bool = False
    policy: Callable[[fx.GraphModule], Value] | None = None
    key: Key = (None, frozenset())
    modes: tuple[bool, ...] = ()  # of each part of the model when it was captured
    why_static: str = ""
    shapes: tuple[tuple[int | str, ...], ...] = ()
    # The operators before which to cut, and all of them in the first trace; None: at the marks.
    chosen: tuple[Sequence[int], Kinds] | None = None
    cuts: dict[Key, Cut] = field(default_factory=dict)

    def first(self, choose: Choose) -> Cut:
        """Trace the model in the mode that it is in, and cut it as chosen."""
        self.modes = modes_of(self.skeleton)
        self.key = (self.modes[0] if len(set(self.modes)) == 1 else None, frozenset())
        cut = self.cuts[self.key] = self._cut(self.key, choose)
        return cut

    def piece(self, stage: int, key: Key) -> StagePiece:
        if key not in self.cuts:
            try:
                cut = self._cut(key)
            except CaptureError as error:
                raise with_second_way(error, "") if error.modules else error from error.__cause__
            self.cuts[key] = self._checked(cut, key)
        return self.cuts[key].pieces[stage]

    def __deepcopy__(self, memo: dict[int, object]) -> Retracer:
        return self

    def _cut(self, key: Key, choose: Choose | None = None) -> Cut:
        mode, fixed = key
        if mode is None:  # mixed, as captured; an evaluation may have been traced since
            for part, training in zip(self.skeleton.modules(), self.modes, strict=True):
                part.training = training
        fall_back = self.fall_back and choose is not None  # later traces must leave open what the first one did
        traced = trace(self.skeleton, self._example(fixed), training=mode, points=self.points, fall_back=fall_back)
        flat = flatten(traced, () if self.policy is None else policy_positions(self.policy, traced.root))
        shapes = tuple(tuple(size_of(s) for s in node.meta["val"].shape) for node in traced.inputs)
        if choose is not None:
            self.shapes = shapes
            if traced.why_static:
                self.why_static = traced.why_static
                self.example = self.example._replace(dims=(None,) * len(self.example.dims))
        known = dict(fixed)
        open_shapes = [[known.get(str(size), size) for size in shape] for shape in self.shapes]
        guards = (*traced.guards, *where_shapes_differ(open_shapes, shapes))
        return self.cut_at(flat, self._marks(flat, choose), guards)

    def cut_at(self, flat: Traced, marks: Sequence[Mark], guards: tuple[Guard, ...] = ()) -> Cut:
        """Cut one trace of the model."""
        return Cutter(place(flat, marks), self.names, transmit=self.transmit, carry=self.carry).cut(guards)

    def _marks(self, flat: Traced, choose: Choose | None) -> Sequence[Mark]:
        here: Kinds = [(module_path(node), str(node.target)) for node in flat.nodes]
        if choose is not None and (places := choose(flat)) is not None:
            self.chosen = places, here
        if self.chosen is None:
            return flat.marks
        places, first = self.chosen
        marks = []
        for wanted, at in zip(places, found_again(places, first, here), strict=True):
            module, operator = first[wanted]
            if at == len(here):
                raise CaptureError(
                    f"in another mode or size the model has no {operator} in {module or 'its own forward'}, before which it was "
                    "to be cut; name the cuts with split_spec="
                )
            if wanted and first[wanted - 1][0] != module:
                while at and here[at - 1][0] == here[at][0]:
                    at -= 1  # a batch norm in training counts its batches before what it does in evaluation, too
            marks.append(Mark(at, f"operator {at} ({operator} in {module})"))
        return marks

    def partners(self) -> dict[str, frozenset[str]]:
        """For each size that may change, the sizes of other arguments that are its equal in the example, as the batch's are."""
        places: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
        for leaf, shape in zip(self.example.leaves, self.shapes, strict=True):
            for dimension, name in zip(enumerate(leaf.shape), shape, strict=True):
                if isinstance(name, str):
                    places[dimension].add(name)
        equal = places.values()
        return {n: frozenset().union(*(own for own in equal if n in own)) - {n} for own in equal for n in own}

    def _example(self, fixed: Fixed) -> Example:
        """What the model is traced with, for sizes that are fixed."""
        if not fixed:
            return self.example
        known: dict[int | str, int] = dict(fixed)
        leaves, dims = [], []
        for leaf, spec, shape in zip(self.example.leaves, self.example.dims, self.shapes, strict=True):
            sizes = [known.get(name, now) for name, now in zip(shape, leaf.shape, strict=True)]
            leaves.append(torch.empty(sizes, dtype=leaf.dtype, device="meta"))
            dims.append({d: v for d, v in (spec or {}).items() if shape[d] not in known} or None)
        return self.example._replace(leaves=leaves, dims=tuple(dims))

    def _checked(self, cut: Cut, key: Key) -> Cut:
        """The other graph must send the same things, for the stages may not know of each other's mode and sizes."""
        mode, fixed = key
        base = self.cuts.get((mode, frozenset()), self.cuts[self.key])
        when = f"in {'train' if mode else 'eval'} mode"
        instead = "capture the model once in each mode instead"
        if fixed:
            when = f"with {where(zip(self.example.table.names, self.shapes, strict=True), fixed, 'being')}"
            instead = "avoid that size, or capture the model with an example of that size instead"
        if len(cut.pieces) != len(base.pieces):
            raise CaptureError(
                f"{when} the model falls into {len(cut.pieces)} stages, not {len(base.pieces)}; {instead}"
            )
        shapes, partners = [leaf.shape for leaf in self._example(fixed).leaves], self.partners()
        for k, (old, new) in enumerate(zip(base.pieces, cut.pieces, strict=True)):
            last = new is cut.pieces[-1]
            if not same_wires(old.inputs, new.inputs) or not (last or same_wires(old.outputs, new.outputs)):
                if fixed and work(base.placed, shapes) == work(cut.placed, shapes):
                    return base._replace(pieces=tuple(replace(p, guards=new.guards) for p in base.pieces))
                raise CaptureError(
                    f"{when} stage {k} takes ({_listed(new.inputs)}) and gives ({_listed(new.outputs)}); it was captured "
                    f"with ({_listed(old.inputs)}) and ({_listed(old.outputs)}); {instead}"
                )
            # Can it know of these sizes, by its own inputs or as those of one batch?
            seen = {size for wire in self.cuts[self.key].pieces[k].inputs for size in wire.shape}
            unseen = any(not seen & {name, *partners[name]} for name, _ in fixed)
            if unseen and work(base.placed, shapes, k) != work(cut.placed, shapes, k):
                raise CaptureError(
                    f"{when} stage {k} does other work, and sees that size in none of its inputs; {instead}"
                )
        return cut


def _listed(wires: Sequence[Wire]) -> str:
    return ", ".join(map(str, wires)) or "nothing"


def policy_positions(policy: Callable[[fx.GraphModule], Value], root: fx.GraphModule) -> list[str]:
    """The names of the nodes before which a policy wants to cut."""
    before = {node.name for node in root.graph.nodes}
    result = policy(root)
    if not isinstance(result, fx.GraphModule):
        return [str(name) for name in result]
    names, following = [], ""
    for node in reversed(list(result.graph.nodes)):
        if "pipe_split" in str(getattr(node.target, "__name__", node.target)):
            names.append(following)
            result.graph.erase_node(node)
        elif node.name in before:
            following = node.name
    return names


def work(placed: Placed, shapes: Sequence[Sequence[int]], stage: int | None = None) -> list[Any]:
    """What a trace does when the arguments have these shapes, in all or as far as `stage` is concerned: the operators on their
    values in their order, with a number for each value and for each size what it is.

    Two traces can so be compared. A size of 1 is a constant to export. Where that size would have crossed to another stage as a
    number, a trace for it has a wire less; when the two differ in nothing else, the one with the size open does for 1, too.

    Values that a stage gets from others are numbered as they are first used. What is not looked into (the body of a region)
    is like nothing else.
    """
    traced = placed.flat
    sizes: dict[object, int] = {}
    for node, shape in zip(traced.inputs, shapes, strict=True):
        for size, now in zip(node.meta["val"].shape, shape, strict=True):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                sizes[size.node.expr] = now
    numbers = {node: f"value {i}" for i, node in enumerate(traced.origins)}

    def form(value: object) -> Any:
        if not isinstance(value, fx.Node):
            return type(value), value
        if not is_size(value):
            return numbers.setdefault(value, f"value {len(numbers)}")
        symbol = value.meta.get("val")
        known = symbol.node.expr.subs(sizes) if isinstance(symbol, torch.SymInt) else None
        return (int, int(known)) if known is not None and known.is_Integer else value

    origins = traced.origins.values()
    rows: list[object] = [(o.name, o.value.tolist()) if isinstance(o, FromConstant) else o for o in origins]
    for node in placed.flat.nodes:
        if not is_size(node) and (stage is None or placed.stage[node] in (stage, EVERYWHERE)):
            what = node.target if node.op == "call_function" else node
            rows.append((placed.stage[node], what, *(fx.node.map_aggregate(a, form) for a in (node.args, node.kwargs))))
            form(node)
    last = stage is None or stage == placed.num_stages - 1
    return [*rows, traced.recipe, [form(value) for value in traced.outputs] if last else []]
