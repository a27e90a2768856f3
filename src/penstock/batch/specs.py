"""What a user says about a value: cut it along a dimension, hand it to every microbatch, reduce it, or it is ready.

A spec stands where its value stands (a tuple for positional arguments, a dict for keyword arguments, and so on down
the tree), or above it, and then it holds for everything below. None means: the default rule (see split_batch.py).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch.utils import _pytree as pytree

from penstock.batch.masks import is_block_mask
from penstock.checks import check_types
from penstock.errors import SplitError
from penstock.nest import By, Node, Value, open_node


@dataclass(frozen=True, slots=True, repr=False)
class TensorChunkSpec:
    """Cut this tensor along `split_dim` (negative: from the last dimension), or put its chunks together along it.

    >>> TensorChunkSpec(1)
    TensorChunkSpec(1)
    """

    split_dim: int

    def __repr__(self) -> str:
        return f"TensorChunkSpec({self.split_dim})"

    @staticmethod
    def from_tuple(chunk_dims: tuple[object, ...]) -> tuple[object, ...]:
        """A spec for each positional argument, from dimensions; None stays None, the default rule.

        >>> TensorChunkSpec.from_tuple((0, 1, None))
        (TensorChunkSpec(0), TensorChunkSpec(1), None)
        """
        return tuple(pytree.tree_map_only(int, TensorChunkSpec, chunk_dims))

    @staticmethod
    def from_dict(chunk_dims: Mapping[str, object]) -> dict[str, object]:
        """A spec for each keyword argument, from dimensions.

        >>> TensorChunkSpec.from_dict({"mask": 1})
        {'mask': TensorChunkSpec(1)}
        """
        return dict(pytree.tree_map_only(int, TensorChunkSpec, dict(chunk_dims)))


@dataclass(frozen=True, slots=True)
class Replicate:
    """Hand this value to every microbatch as it is. The class itself serves as well as an instance.

    schedule = Schedule1F1B(stage, 4, kwargs_chunk_spec={"mask": Replicate})
    """


@dataclass(frozen=True, slots=True)
class CustomReducer:
    """Fold what the microbatches give into one value: `reduce_fn(reduce_fn(init_value, first), second)` and so on.

    >>> from penstock.batch import merge_chunks
    >>> merge_chunks([2, 5], CustomReducer(0, max))
    5
    """

    init_value: object
    reduce_fn: Callable[[Value, Value], Value]


sum_reducer = CustomReducer(0, operator.add)


class Microbatches(Sequence[Value]):
    """A batch that is already cut: given where a batch is expected, it is used as it is.

        schedule.step(Microbatches([x0, x1, x2]), target=Microbatches([y0, y1, y2]))
        schedule.step(Microbatches([((x0,), {"mask": m0}), ((x1,), {"mask": m1})]))

    As the only positional argument, an item `(args tuple, kwargs dict)` is one call, any other item is the one
    positional argument of a call. Anywhere else, also inside a list or dict, the items stand for that one value.
    """

    __slots__ = ("_items",)

    def __init__(self, items: Iterable[Value]) -> None:
        try:
            self._items = tuple(items)
        except TypeError:
            check_types("Microbatches", SplitError, items=(items, Iterable))
            raise

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int | slice) -> Value:
        return Microbatches(self._items[index]) if isinstance(index, slice) else self._items[index]

    def __repr__(self) -> str:
        return f"Microbatches({list(self._items)!r})"

    def calls(self) -> list[tuple[tuple[Value, ...], dict[str, Value]]]:
        """Each item as the arguments of one call; none, if no item is (args tuple, kwargs dict)."""
        if not any(map(_is_call, self._items)):
            return []
        return [(item[0], dict(item[1])) if _is_call(item) else ((item,), {}) for item in self._items]


def _is_call(item: object) -> bool:
    return type(item) is tuple and len(item) == 2 and type(item[0]) is tuple and type(item[1]) is dict


def is_leaf_spec(spec: object) -> bool:
    """Whether this is a spec, rather than a tree of specs or None."""
    return isinstance(spec, TensorChunkSpec | CustomReducer) or is_replicate(spec)


def is_replicate(spec: object) -> bool:
    return isinstance(spec, Replicate) or spec is Replicate


def open_value(value: object) -> Node | None:
    """A container of a batch, opened by one level; block masks and ready microbatches are taken whole."""
    return None if isinstance(value, Microbatches) or is_block_mask(value) else open_node(value)


def child_specs(spec: object, node: Node, path: Path) -> Sequence[object]:
    """The spec of each child: the tree of specs is followed, a single spec (or None) holds for all."""
    if spec is None or is_leaf_spec(spec):
        return [spec] * len(node.keys)
    if isinstance(spec, Mapping):
        unknown = [key for key in spec if key not in node.keys]
        if unknown:
            raise SplitError(
                f"{path.spec_name} has entries for {unknown}, but {path} has only {list(node.keys)}; "
                "leave out what is not there"
            )
        return [spec.get(key) for key in node.keys]
    inside = open_value(spec)
    if inside is not None and len(inside.keys) == len(node.keys):
        if isinstance(spec, tuple | list) or list(inside.keys) == list(node.keys):
            return inside.children
    raise SplitError(
        f"the spec for {path} is {spec!r}; expected one entry for each of {list(node.keys)}, "
        "or a single TensorChunkSpec(dim), Replicate() or None for all of it"
    )


class Path(NamedTuple):
    """Where a leaf stands; made into text only when an error needs it."""

    name: str  # what it begins with
    spec_name: str  # the parameter that takes the specs for it
    parent: Path | None = None
    node: Node | None = None
    position: int = 0

    def child(self, node: Node, index: int) -> Path:
        return Path(self.name, self.spec_name, self, node, index)

    def __str__(self) -> str:
        if self.parent is None or self.node is None:
            return self.name
        return f"{self.parent}{self.node.written(self.position)}"

    def write(self, spec: str) -> str:
        """The argument to write so that this leaf, and no other, gets the spec."""
        if self.parent is None or self.node is None:
            return f"{self.spec_name}={spec}"
        if self.node.by is not By.PLACE:
            return self.parent.write(f"{{{self.node.keys[self.position]!r}: {spec}}}")
        entries = ["None"] * len(self.node.keys)
        entries[self.position] = spec
        return self.parent.write(f"({', '.join(entries)}{',' if len(entries) == 1 else ''})")
