"""How large the values of a traced graph are with the example, and how much work its operators do.

    sizes = ExampleSizes([*flat.origins, *flat.nodes])
    sizes.bytes(node.meta["val"]), sizes.work(node)

Sizes that depend on data (rows that a router gives to an expert: ``torch.where``, ``nonzero``) are not known from an example.
They count as the largest that they are likely to be: as many as the tensor that decides has elements.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from torch import SymInt, Tensor, fx

from penstock.nest import Value, tensors_in


class ExampleSizes:
    """Sizes with the example, of all values of a graph whose nodes are given in order."""

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._known: dict[Any, int] = {}  # a symbol: its value
        deciding: dict[fx.Node, int] = {}  # elements of the largest tensor of whole numbers behind a node
        for node in nodes:
            value, before = node.meta.get("val"), node.all_input_nodes
            decided = max((deciding.get(arg, 0) for arg in before), default=0)
            for size in _open_sizes(value):
                if size.node.hint is not None and size.node.expr.is_symbol:
                    self._known[size.node.expr] = size.node.hint
                for symbol in size.node.expr.free_symbols - self._known.keys() if size.node.hint is None else ():
                    here = (self.elements(arg.meta.get("val")) for arg in before)
                    self._known[symbol] = max(1, decided, *map(int, here))
            own = [self.elements(part) for part in tensors_in(value) if not part.is_floating_point()]
            deciding[node] = max(decided, *map(int, own), 0)

    def of(self, value: Tensor) -> list[int]:
        return [self._size(size) for size in value.shape]

    def elements(self, value: Value) -> float:
        return float(sum(prod(self.of(part)) for part in tensors_in(value)))

    def bytes(self, value: Value) -> float:
        return sum(self.elements(part) * part.dtype.itemsize for part in tensors_in(value))

    def work(self, node: fx.Node) -> float:
        """Operations of one node, roughly: matrix products by their sizes, everything else by what it makes."""
        made = self.elements(node.meta.get("val"))
        tensors = [a.meta.get("val") for a in node.all_input_nodes]
        shapes = [self.of(t) for t in tensors if isinstance(t, Tensor)]
        name = str(node.target)
        if "linear" in name or "mm" in name or "matmul" in name:
            return 2.0 * made * (shapes[0][-1] if shapes and shapes[0] else 1)
        if "scaled_dot_product" in name and shapes:
            return 4.0 * made * (shapes[0][-2] if len(shapes[0]) > 1 else 1)
        if "conv" in name and len(shapes) > 1:
            return 2.0 * made * prod(shapes[1][1:])
        return made

    def _size(self, size: int | SymInt) -> int:
        if not isinstance(size, SymInt):
            return int(size)
        if size.node.hint is not None:
            return int(size.node.hint)
        expression: Any = size.node.expr
        return int(expression.subs({symbol: self._known.get(symbol, 1) for symbol in expression.free_symbols}))


def decided_by_data(value: Value) -> bool:
    """Whether some size of a value is not known from the sizes of the arguments."""
    return any(size.node.hint is None for size in _open_sizes(value))


def _open_sizes(value: Value) -> list[SymInt]:
    sizes = [size for part in tensors_in(value) for size in part.shape]
    return [size for size in (value, *sizes) if isinstance(size, SymInt)]
