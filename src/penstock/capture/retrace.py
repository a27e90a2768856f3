"""Tracing and cutting a model, as often as needed: now in its mode, later in the other one.

retracer.piece(0, (False, frozenset()))               # stage 0 in evaluation, traced when first asked for
retracer.piece(0, (True, frozenset({("s28", 1)})))     # in training, for a batch of one row
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from penstock.capture.cutter import Cut, Cutter, StagePiece, module_path
from penstock.capture.export import Example, FromConstant, FromInput, trace
from penstock.capture.flat import Flat, Mark, flatten, is_size
from penstock.capture.marks import SplitPoint
from penstock.capture.place import EVERYWHERE, Placed, place
from penstock.capture.skeleton import Skeleton
from penstock.capture.stage_state import StateNames
from penstock.capture.wires import Fixed, Key, Wire, same_wires, size_of, where, where_shapes_differ
from penstock.errors import CaptureError
from penstock.nest import Value
from penstock.stage.buffers import modes_of

Choose = Callable[[Flat], Sequence[int] | None]  # positions before which to cut; None: at the marks
_FOLLOWING = 4  # operators, of which one will be there in every trace


class Landmark(NamedTuple):
    """What tells an operator from the others in every trace of the model, though a mode or a size may have more or fewer."""

    module: str
    operator: str
    number: int  # which of that module's operators of that kind it is
    after: str  # the module that did something just before this one
    number_after: int  # the same, counted after that module alone
    of: int = 0  # how many of that kind the module has
    opens: bool = False  # whether the operator before it is another module's


def landmarks(flat: Flat) -> list[Landmark]:
    """That of each node."""
    seen: Counter[tuple[str, ...]] = Counter()
    found = []
    module = after = ""
    for node in flat.nodes:
        path, operator = module_path(node), str(node.target)
        opens = path != module
        if opens:
            module, after = path, module
        counts = seen[path, operator], after, seen[path, operator, after]
        found.append(Landmark(path, operator, *counts, opens=opens))
        seen[path, operator] += 1
        seen[path, operator, after] += 1
    return [mark._replace(of=seen[mark.module, mark.operator]) for mark in found]


def found_again(marks: Sequence[Sequence[Landmark]], here: Sequence[Landmark]) -> list[int | None]:
    """Where in another trace each of them is, None for one that is not there. What was before an operator tells it best, or its
    number where its module has as many as before; one that has no work in that mode or size is not there, but the next one is."""
    near = {(m.module, m.operator, m.after, m.number_after): at for at, m in enumerate(here)}
    far = {m[:3]: at for at, m in enumerate(here)}
    count = {m[:2]: m.of for m in here}

    def place_of(mark: Landmark) -> int | None:
        at = near.get((mark.module, mark.operator, mark.after, mark.number_after))
        return far.get(mark[:3]) if at is None and mark.of == count.get(mark[:2]) else at

    return [next((at for at in map(place_of, chain) if at is not None), far.get(chain[0][:3])) for chain in marks]


@dataclass
class Retracer:
    """All that is needed to trace the model again; holds none of its data."""

    skeleton: Skeleton
    example: Example  # its leaves are on the meta device
    fall_back: bool
    points: Mapping[str, frozenset[SplitPoint]]
    names: StateNames
    transmit: bool = False
    carry: bool = False
    policy: Callable[[fx.GraphModule], Value] | None = None
    key: Key = (None, frozenset())
    modes: tuple[bool, ...] = ()  # of each part of the model when it was captured
    why_static: str = ""
    shapes: tuple[tuple[int | str, ...], ...] = ()
    # The operators before which to cut, each with some that follow it; None: at the marks.
    chosen: tuple[tuple[Landmark, ...], ...] | None = None
    cuts: dict[Key, Cut] = field(default_factory=dict)

    def first(self, choose: Choose) -> Cut:
        """Trace the model in the mode that it is in, and cut it as chosen."""
        self.modes = modes_of(self.skeleton.module)
        self.key = (self.modes[0] if len(set(self.modes)) == 1 else None, frozenset())
        cut = self.cuts[self.key] = self._cut(self.key, choose)
        return cut

    def piece(self, stage: int, key: Key) -> StagePiece:
        if key not in self.cuts:
            self.cuts[key] = self._checked(self._cut(key), key)
        return self.cuts[key].pieces[stage]

    def __deepcopy__(self, memo: dict[int, object]) -> Retracer:
        return self

    def _cut(self, key: Key, choose: Choose | None = None) -> Cut:
        mode, fixed = key
        if mode is None:  # mixed, as captured; an evaluation may have been traced since
            for part, training in zip(self.skeleton.module.modules(), self.modes, strict=True):
                part.training = training
        traced = trace(
            self.skeleton,
            self._example(fixed),
            training=mode,
            points=self.points,
            fall_back=self.fall_back and choose is not None,  # later traces must leave open what the first one did
        )
        wanted = policy_positions(self.policy, traced.root) if self.policy is not None else ()
        flat = flatten(traced, wanted)
        inputs = [node for node, origin in traced.origins.items() if isinstance(origin, FromInput)]
        shapes = tuple(tuple(size_of(s) for s in node.meta["val"].shape) for node in inputs)
        if choose is not None:
            self.shapes = shapes
            if traced.why_static:
                fixed_dims = tuple(None for _ in self.example.dims)
                self.why_static, self.example = traced.why_static, replace(self.example, dims=fixed_dims)
        placed = place(flat, self._marks(flat, choose))
        cutter = Cutter(
            placed, self.names, input_names=self.example.table.names, transmit=self.transmit, carry=self.carry
        )
        known = dict(fixed)
        open_shapes = [[known.get(str(size), size) for size in shape] for shape in self.shapes]
        guards = (*traced.guards, *where_shapes_differ(open_shapes, shapes))
        cut = cutter.cut()
        return replace(cut, pieces=tuple(replace(piece, guards=guards) for piece in cut.pieces))

    def _marks(self, flat: Flat, choose: Choose | None) -> Sequence[Mark]:
        here = landmarks(flat)
        if choose is not None and (places := choose(flat)) is not None:
            self.chosen = tuple(tuple(here[place : place + _FOLLOWING]) for place in places)
        if self.chosen is None:
            return flat.marks
        marks = []
        for (mark, *_), at in zip(self.chosen, found_again(self.chosen, here), strict=True):
            if at is None:
                raise CaptureError(
                    f"in another mode or size the model has no {mark.operator} in {mark.module or 'its own forward'}, before "
                    "which it was to be cut; name the cuts with split_spec="
                )
            while mark.opens and at and not here[at].opens:
                at -= 1  # a batch norm in training counts its batches before what it does in evaluation, too
            marks.append(Mark(at, f"operator {at} ({mark.operator} in {mark.module})"))
        return marks

    def partners(self) -> dict[str, frozenset[str]]:
        """For each size that may change, the sizes of other arguments that are its equal in the example, as the batch's are."""
        places: dict[tuple[int, int], set[str]] = {}
        for leaf, shape in zip(self.example.leaves, self.shapes, strict=True):
            for dim, (size, name) in enumerate(zip(leaf.shape, shape, strict=True)):
                if isinstance(name, str):
                    places.setdefault((dim, size), set()).add(name)
        equal = places.values()
        names = {name for own in equal for name in own}
        return {name: frozenset(n for own in equal if name in own for n in own if n != name) for name in names}

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
        return Example(self.example.table, leaves, tuple(dims))

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
        shapes = [leaf.shape for leaf in self._example(fixed).leaves]
        for k, (old, new) in enumerate(zip(base.pieces, cut.pieces, strict=True)):
            last = new is cut.pieces[-1]
            if not same_wires(old.inputs, new.inputs) or not (last or same_wires(old.outputs, new.outputs)):
                if fixed and work(base.placed, shapes) == work(cut.placed, shapes):
                    return replace(base, pieces=tuple(replace(p, guards=new.guards) for p in base.pieces))
                raise CaptureError(
                    f"{when} stage {k} takes ({_listed(new.inputs)}) and gives ({_listed(new.outputs)}); it was captured "
                    f"with ({_listed(old.inputs)}) and ({_listed(old.outputs)}); {instead}"
                )
            if self._unseen(k, fixed) and work(base.placed, shapes, k) != work(cut.placed, shapes, k):
                raise CaptureError(
                    f"{when} stage {k} does other work, and sees that size in none of its inputs; {instead}"
                )
        return cut

    def _unseen(self, stage: int, fixed: Fixed) -> bool:
        """Whether a stage cannot know of some of these sizes, neither by its own inputs nor as those of one batch."""
        seen = {size for wire in self.cuts[self.key].pieces[stage].inputs for size in wire.shape}
        partners = self.partners()
        return any(not seen & {name, *partners[name]} for name, _ in fixed)


def _listed(wires: Sequence[Wire]) -> str:
    return ", ".join(map(str, wires)) or "nothing"


def policy_positions(policy: Callable[[fx.GraphModule], Value], root: fx.GraphModule) -> list[str]:
    """The names of the nodes before which a policy wants to cut."""
    before = {node.name for node in root.graph.nodes}
    result = policy(root)
    if not isinstance(result, fx.GraphModule):
        return [str(name) for name in result]
    names = []
    for node in list(result.graph.nodes):
        if "pipe_split" in str(getattr(node.target, "__name__", node.target)):
            following = node.next
            while following.name not in before:
                following = following.next
            names.append(following.name)
            result.graph.erase_node(node)
    return names


def work(placed: Placed, shapes: Sequence[Sequence[int]], stage: int | None = None) -> list[Any]:
    """What a trace does when the arguments have these shapes, in all or as far as `stage` is concerned: the operators on their
    values in their order, with a number for each value and for each size what it is.

    Two traces can so be compared. A size of 1 is a constant to export. Where that size would have crossed to another stage as a
    number, a trace for it has a wire less; when the two differ in nothing else, the one with the size open does for 1, too.

    Values that a stage gets from others are numbered as they are first used. What is not looked into (the body of a region)
    is like nothing else.
    """
    traced = placed.flat.traced
    sizes: dict[object, int] = {}
    for node, origin in traced.origins.items():
        if isinstance(origin, FromInput):
            for size, now in zip(node.meta["val"].shape, shapes[origin.index], strict=True):
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

    rows: list[object] = [
        (o.name, o.value.tolist()) if isinstance(o, FromConstant) else o for o in traced.origins.values()
    ]
    for node in placed.flat.nodes:
        if not is_size(node) and (stage is None or placed.stage[node] in (stage, EVERYWHERE)):
            what = node.target if node.op == "call_function" else node
            rows.append((placed.stage[node], what, *(fx.node.map_aggregate(a, form) for a in (node.args, node.kwargs))))
            form(node)
    last = stage is None or stage == placed.num_stages - 1
    return [*rows, traced.recipe, [form(value) for value in traced.outputs] if last else []]
