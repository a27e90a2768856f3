"""Whether two traces of a model do the same.

A size of 1 is a constant to export. Where that size would have crossed to another stage as a number, a trace for it has
a wire less; when the two traces differ in nothing else, the one with the size open does for 1, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from penstock.capture.export import FromConstant, FromInput, Origin
from penstock.capture.flat import is_size
from penstock.capture.place import EVERYWHERE, Placed

Shapes = Sequence[Sequence[int]]  # of the model's arguments, leaf by leaf


def same_work(old: Placed, new: Placed, shapes: Shapes, *, stage: int | None = None) -> bool:
    """The same operators on the same values, in the same order and stages, when the arguments have these shapes.

    With `stage`, as far as that stage is concerned.
    """
    one, other = old.flat.traced, new.flat.traced
    known = _same_origins(one.origins, other.origins)
    if known is None or one.recipe != other.recipe:
        return False
    pairing = _Pairing(_numbers(old, shapes), _numbers(new, shapes), known, alone=stage is not None)
    ours, theirs = (
        [node for node in p.flat.nodes if not is_size(node) and (stage is None or p.stage[node] in (stage, EVERYWHERE))]
        for p in (old, new)
    )
    last = stage is None or stage == old.num_stages - 1
    return (
        len(ours) == len(theirs)
        and all(old.stage[a] == new.stage[b] and pairing.same_call(a, b) for a, b in zip(ours, theirs, strict=True))
        and (not last or pairing.same(one.outputs, other.outputs))
    )


@dataclass
class _Pairing:
    """Which values of two graphs stand for each other."""

    old_numbers: Mapping[Any, int]  # what each changing size of the old graph is
    new_numbers: Mapping[Any, int]
    known: dict[fx.Node, fx.Node] = field(default_factory=dict)
    alone: bool = False  # a stage by itself: what it gets from others are the same values, each under one name

    def same_call(self, one: fx.Node, other: fx.Node) -> bool:
        self.known[one] = other
        return (
            one.op == other.op == "call_function"  # anything else is the body of a region, not looked into
            and one.target == other.target
            and self.same((one.args, one.kwargs), (other.args, other.kwargs))
        )

    def same(self, ours: Any, theirs: Any) -> bool:
        flat, spec = pytree.tree_flatten(ours)
        other, other_spec = pytree.tree_flatten(theirs)
        return spec == other_spec and all(map(self._same_leaf, flat, other))

    def _same_leaf(self, one: Any, other: Any) -> bool:
        if isinstance(one, fx.Node) and not is_size(one):
            if self.alone and isinstance(other, fx.Node):
                self.known.setdefault(one, other)
            return self.known.get(one) is other
        mine, theirs = _value(one, self.old_numbers), _value(other, self.new_numbers)
        return type(mine) is type(theirs) and bool(mine == theirs)


def _value(leaf: Any, numbers: Mapping[Any, int]) -> Any:
    """A size as the number that it is; other values as they are."""
    if not isinstance(leaf, fx.Node):
        return leaf
    found = leaf.meta.get("val")
    if not isinstance(found, torch.SymInt):
        return leaf
    number = found.node.expr.subs(numbers)
    return int(number) if number.is_Integer else leaf


def _numbers(placed: Placed, shapes: Shapes) -> dict[Any, int]:
    """Every changing size of the arguments, by torch's symbol for it."""
    found: dict[Any, int] = {}
    for node, origin in placed.flat.traced.origins.items():
        if isinstance(origin, FromInput):
            for size, now in zip(node.meta["val"].shape, shapes[origin.index], strict=True):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    found[size.node.expr] = now
    return found


def _same_origins(ours: Mapping[fx.Node, Origin], theirs: Mapping[fx.Node, Origin]) -> dict[fx.Node, fx.Node] | None:
    """Arguments, parameters, buffers and constants of one graph to those of the other; None if they are not the same."""
    if len(ours) != len(theirs):
        return None
    found = {}
    for (node, one), (match, other) in zip(ours.items(), theirs.items(), strict=True):
        if isinstance(one, FromConstant) and isinstance(other, FromConstant):
            equal = one.name == other.name and (one.value is other.value or torch.equal(one.value, other.value))
        else:
            equal = one == other
        if not equal:
            return None
        found[node] = match
    return found
