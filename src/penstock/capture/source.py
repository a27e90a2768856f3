"""Tracing and cutting a model, as often as needed: now in its mode, later in the other one.

source = Source.of(model, args, kwargs, ...)
source.piece(0, (False, frozenset()))        # stage 0 in evaluation, traced when first asked for
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from penstock.capture.cut import Cut, Cutter, Piece, module_path
from penstock.capture.flat import Flat, Mark, flatten
from penstock.capture.inputs import InputTable
from penstock.capture.marks import SplitPoint
from penstock.capture.module import Key, same_wires
from penstock.capture.names import StateNames
from penstock.capture.place import place
from penstock.capture.same import same_work
from penstock.capture.skeleton import Skeleton
from penstock.capture.trace import Dims, FromInput, trace
from penstock.capture.wires import Wire, size_of
from penstock.errors import CaptureError

ChooseCuts = Callable[[Flat, int], Sequence[int]]


Landmark = tuple[str, str, int]  # the module, the operator, and which of that module's operators of that kind it is


def landmarks(flat: Flat) -> list[Landmark]:
    """For each node what tells it from the others, the same in every trace of the model."""
    seen: Counter[tuple[str, str]] = Counter()
    found = []
    for node in flat.nodes:
        kind = (module_path(node), str(node.target))
        found.append((*kind, seen[kind]))
        seen[kind] += 1
    return found


@dataclass
class Source:
    """All that is needed to trace the model again; holds none of its data."""

    skeleton: Skeleton
    table: InputTable
    leaves: list[torch.Tensor]  # of the example, on the meta device
    dims: Dims
    fall_back: bool
    points: Mapping[str, frozenset[SplitPoint]]
    names: StateNames
    transmit: bool = False
    carry: bool = False
    policy: Callable[[fx.GraphModule], Any] | None = None
    num_stages: int | None = None
    key: Key = (None, frozenset())
    why_static: str = ""
    gave_up: bool = False  # on dynamic sizes
    shapes: tuple[tuple[int | str, ...], ...] = ()
    chosen: tuple[Landmark, ...] = ()  # the operators before which to cut, once they are chosen
    cuts: dict[Key, Cut] = field(default_factory=dict)

    def first(self, choose_cuts: ChooseCuts) -> Cut:
        """Trace the model in the mode that it is in, and cut it: where the marks are or, with `num_stages`, as chosen."""
        modes = {m.training for m in self.skeleton.module.modules()}
        self.key = (modes.pop() if len(modes) == 1 else None, frozenset())
        cut = self._cut(self.key, choose_cuts)
        self.cuts[self.key] = cut
        return cut

    def piece(self, stage: int, key: Key) -> Piece:
        if key not in self.cuts:
            self.cuts[key] = self._checked(self._cut(key), key)
        return self.cuts[key].pieces[stage]

    def __deepcopy__(self, memo: dict[int, Any]) -> Source:
        return self

    def _cut(self, key: Key, choose_cuts: ChooseCuts | None = None) -> Cut:
        mode, ones = key
        dims = self.dims if not self.gave_up else tuple(None for _ in self.dims)
        traced = trace(
            self.skeleton,
            self.table,
            leaves=self._leaves(ones),
            training=mode,
            dims=self._without(dims, ones),
            points=self.points,
            fall_back=self.fall_back,
        )
        wanted = policy_positions(self.policy, traced.root) if self.policy is not None else ()
        flat = flatten(traced, wanted)
        if not self.cuts:
            self.gave_up = bool(traced.why_static)
            self.why_static = traced.why_static or self.why_static
            inputs = [node for node, origin in traced.origins.items() if isinstance(origin, FromInput)]
            self.shapes = tuple(tuple(size_of(s) for s in node.meta["val"].shape) for node in inputs)
        placed = place(flat, self._marks(flat, choose_cuts))
        return Cutter(placed, self.names, input_names=self.table.names, transmit=self.transmit, carry=self.carry).cut()

    def _marks(self, flat: Flat, choose_cuts: ChooseCuts | None) -> Sequence[Mark]:
        if self.num_stages is None:
            return flat.marks
        here = landmarks(flat)
        if choose_cuts is not None:
            self.chosen = tuple(here[place] for place in choose_cuts(flat, self.num_stages))
        index = {mark: place for place, mark in enumerate(here)}
        lost = [mark for mark in self.chosen if mark not in index]
        if lost:
            raise CaptureError(
                f"in another mode or size the model has no {lost[0][1]} in {lost[0][0] or 'its own forward'}, before which "
                "it was to be cut; name the cuts with split_spec="
            )
        return [Mark(index[mark], f"operator {index[mark]} ({mark[1]} in {mark[0]})") for mark in self.chosen]

    def partners(self) -> dict[str, frozenset[str]]:
        """The sizes that stand in the same dimension of another argument and are equal in the example: of one batch."""
        places: dict[tuple[int, int], set[str]] = {}
        for leaf, shape in zip(self.leaves, self.shapes, strict=True):
            for dim, (size, name) in enumerate(zip(leaf.shape, shape, strict=True)):
                if isinstance(name, str):
                    places.setdefault((dim, size), set()).add(name)
        return {name: frozenset(names - {name}) for names in places.values() for name in names if len(names) > 1}

    def _leaves(self, ones: frozenset[str]) -> list[torch.Tensor]:
        if not ones:
            return self.leaves
        made = []
        for leaf, shape in zip(self.leaves, self.shapes, strict=True):
            sizes = [1 if s in ones else now for s, now in zip(shape, leaf.shape, strict=True)]
            made.append(torch.empty(sizes, dtype=leaf.dtype, device="meta"))
        return made

    def _without(self, dims: Dims, ones: frozenset[str]) -> Dims:
        if not ones:
            return dims
        kept = []
        for spec, shape in zip(dims, self.shapes, strict=True):
            left = {d: v for d, v in spec.items() if shape[d] not in ones} if spec else None
            kept.append(left or None)
        return tuple(kept)

    def _checked(self, cut: Cut, key: Key) -> Cut:
        """The other graph must send the same things, for the stages may not know of each other's mode and sizes."""
        mode, ones = key
        base = self.cuts.get((mode, frozenset()), self.cuts[self.key])
        when = f"in {'train' if mode else 'eval'} mode"
        instead = "capture the model once in each mode instead"
        if ones:
            when = f"with {' and '.join(self._dimensions(ones))} being 1"
            instead = "avoid that size, or capture the model with an example of that size instead"
        if len(cut.pieces) != len(base.pieces):
            raise CaptureError(
                f"{when} the model falls into {len(cut.pieces)} stages, not {len(base.pieces)}; {instead}"
            )
        for k, (old, new) in enumerate(zip(base.pieces, cut.pieces, strict=True)):
            last = new is cut.pieces[-1]
            if same_wires(old.inputs, new.inputs) and (last or same_wires(old.outputs, new.outputs)):
                continue
            if ones and same_work(base.placed, cut.placed, [leaf.shape for leaf in self._leaves(ones)]):
                return base
            raise CaptureError(
                f"{when} stage {k} takes ({_listed(new.inputs)}) and gives ({_listed(new.outputs)}); it was captured "
                f"with ({_listed(old.inputs)}) and ({_listed(old.outputs)}); {instead}"
            )
        return cut

    def _dimensions(self, sizes: frozenset[str]) -> list[str]:
        """Where these sizes stand, as a user would say it."""
        return [
            f"dimension {dim} of {name}"
            for name, shape in zip(self.table.names, self.shapes, strict=True)
            for dim, size in enumerate(shape)
            if size in sizes
        ]


def _listed(wires: Sequence[Wire]) -> str:
    return ", ".join(map(str, wires)) or "nothing"


def policy_positions(policy: Callable[[fx.GraphModule], Any], root: fx.GraphModule) -> list[str]:
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
