"""Weight gradients of equal small layers in a graph, done by one batched product, as the eager weight pass does them.

    batch_equal_products(part)     # in place: mm(t(g1), x1), mm(t(g2), x2), ... become one bmm, sum(g1), sum(g2), ... one sum
    packing = pack_outputs(part)   # and the graph returns these as they are; packing.unpack() takes them apart

A small product costs less than calling it, and a graph whose products are calls of a library gains nothing from a compiler.
Only products that depend on no other such product are taken, so that they cannot depend on one another. As in
`penstock.stage.batched`, the bits are those of single products, which is tried once for each size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.passes.tools_common import legalize_graph

from penstock.nest import Value
from penstock.stage.batched import MOST_BYTES, MOST_PRODUCTS, same_bits

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)
_BATCH = "penstock.stage.equal_products"  # marks a part of a batch


class _Product(NamedTuple):
    """The gradient of a linear layer's weight: ``grad.t() @ rows``; and that of its bias, ``grad.sum(0)``."""

    node: fx.Node
    grad: fx.Node
    rows: fx.Node
    total: fx.Node | None


class GradientBatch(NamedTuple):
    """Gradients that lie one behind another in one tensor."""

    places: tuple[int, ...]  # among all gradients
    shape: tuple[int, ...]  # of each of them

    def unpack(self, value: Tensor) -> tuple[Tensor, ...]:
        return value.reshape(len(self.places), *self.shape).unbind(0)


class Packing(NamedTuple):
    """What a graph returns: gradients that come alone, and then batches."""

    alone: tuple[int, ...]  # their places among all gradients
    batches: tuple[GradientBatch, ...]

    def unpack(self, values: Sequence[Tensor]) -> list[Tensor | None]:
        """All gradients, in their order."""
        found: list[Tensor | None] = [None] * (len(self.alone) + sum(len(batch.places) for batch in self.batches))
        for place, value in zip(self.alone, values, strict=False):
            found[place] = value
        for batch, value in zip(self.batches, values[len(self.alone) :], strict=True):
            for place, grad in zip(batch.places, batch.unpack(value), strict=True):
                found[place] = grad
        return found


_Size = tuple[int, int, int, torch.dtype, torch.device, bool]


def batch_equal_products(part: fx.GraphModule) -> None:
    """Do the products of each size at once."""
    found = [product for node in part.graph.nodes if (product := _product(node)) is not None]
    later = {node for product in found for node in (product.node, product.total)}  # and what depends on one of these
    for node in part.graph.nodes:
        if any(given in later for given in node.all_input_nodes):
            later.add(node)
    sizes: dict[_Size, list[_Product]] = {}
    for product in found:
        if product.grad not in later and product.rows not in later:
            sizes.setdefault(_size(product), []).append(product)
    for size, products in sizes.items():
        _, inputs, outputs, dtype, *_ = size
        most = max(1, MOST_BYTES // (inputs * outputs * dtype.itemsize))
        for start in range(0, len(products), most):
            group = products[start : start + most]
            if len(group) > 1 and _gives_same_bits(len(group), size):
                _batch(part.graph, group)
    legalize_graph(part)  # a batch stands where its first product was, before what the others are made of
    part.graph.eliminate_dead_code()
    part.recompile()


def pack_outputs(part: fx.GraphModule) -> Packing | None:
    """Let the graph return batches as they are, where all of a batch is returned, each once; None if there is none."""
    (output,) = part.graph.find_nodes(op="output")
    grads: list[fx.Node | None] = list(output.args[0])
    found: dict[fx.Node, dict[int, int]] = {}  # by batch: the place of each of its gradients
    for place, grad in enumerate(grads):
        if grad is not None and grads.count(grad) == 1 and (taken := _taken_from(grad)) is not None:
            found.setdefault(taken[0], {})[taken[1]] = place
    whole = {node: places for node, places in found.items() if len(places) == node.meta["val"].shape[0]}
    if not whole:
        return None
    batches = []
    for places in whole.values():
        shapes = {tuple(grads[place].meta["val"].shape) for place in places.values()}  # type: ignore[union-attr]
        if len(shapes) > 1:
            return None
        batches.append(GradientBatch(tuple(places[number] for number in sorted(places)), shapes.pop()))
    batched = {place for batch in batches for place in batch.places}
    alone = tuple(place for place in range(len(grads)) if place not in batched)
    output.args = ([*(grads[place] for place in alone), *whole],)
    part.graph.eliminate_dead_code()
    part.recompile()
    return Packing(alone, tuple(batches))


def _taken_from(grad: fx.Node) -> tuple[fx.Node, int] | None:
    """The batch of which a gradient is a part, and which one."""
    node: Any = grad
    turned = False  # by an odd number of transposes
    while True:
        if _turns(node):
            turned = not turned
        elif turned or node.target not in _VIEWS:
            break
        node = node.args[0]
    return None if turned or _BATCH not in node.meta else (node.args[0], node.args[2])


def _product(node: fx.Node) -> _Product | None:
    """The product that this node is, if it is a small one."""
    if node.target is not _aten.mm.default:
        return None
    turned, rows = node.args
    if not isinstance(turned, fx.Node) or not isinstance(rows, fx.Node) or not _turns(turned):
        return None
    grad = turned.args[0]
    if not isinstance(grad, fx.Node) or not all(map(_is_plain, (grad, rows))):
        return None
    if _product_count(grad, rows) > MOST_PRODUCTS:
        return None
    sums = [user for user in grad.users if user.target is _aten.sum.dim_IntList and user.args[1:] == ([0], True)]
    return _Product(node, grad, rows, sums[0] if len(sums) == 1 and not sums[0].kwargs else None)


def _turns(node: fx.Node) -> bool:
    """Whether this is the transpose of a matrix."""
    return node.target is _aten.t.default or (
        node.target is _aten.permute.default and list(node.args[1]) == [1, 0]  # type: ignore[arg-type]
    )


def _is_plain(node: fx.Node) -> bool:
    """A matrix of known size, row after row."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() != 2 or any(type(size) is not int for size in value.shape):
        return False
    return value.numel() > 0 and value.is_contiguous()


def _product_count(grad: fx.Node, rows: fx.Node) -> int:
    return int(grad.meta["val"].numel() * rows.meta["val"].shape[1])


def _size(product: _Product) -> _Size:
    grad, rows = product.grad.meta["val"], product.rows.meta["val"]
    return (grad.shape[0], rows.shape[1], grad.shape[1], grad.dtype, grad.device, product.total is not None)


def _gives_same_bits(count: int, size: _Size) -> bool:
    """Tried with real tensors, in the middle of tracing with fake ones."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily(), torch.no_grad():
        return same_bits(count, *size[:5], torch.get_num_threads())


def _batch(graph: fx.Graph, group: list[_Product]) -> None:
    with graph.inserting_before(group[0].node):
        grads = _stacked(graph, [product.grad for product in group])
        rows = _stacked(graph, [product.rows for product in group])
        turned = _made(graph, _aten.permute.default, grads, [0, 2, 1])
        products = _made(graph, _aten.bmm.default, turned, rows)
        totals = None if group[0].total is None else _made(graph, _aten.sum.dim_IntList, grads, [1], True)
        for place, product in enumerate(group):
            product.node.replace_all_uses_with(_taken(graph, products, place))
            if totals is not None and product.total is not None:
                product.total.replace_all_uses_with(_taken(graph, totals, place))


def _taken(graph: fx.Graph, batch: fx.Node, place: int) -> fx.Node:
    node = _made(graph, _aten.select.int, batch, 0, place)
    node.meta[_BATCH] = True
    return node


def _stacked(graph: fx.Graph, nodes: list[fx.Node]) -> fx.Node:
    rows, columns = nodes[0].meta["val"].shape
    return _made(graph, _aten.view.default, _made(graph, _aten.cat.default, nodes), [len(nodes), rows, columns])


def _made(graph: fx.Graph, target: Callable[..., object], *args: Value) -> fx.Node:
    """A node, with the fake tensor that it gives: backends look at that."""
    node = graph.call_function(target, args)
    values = fx.node.map_arg(args, lambda given: given.meta["val"])
    node.meta["val"] = target(*values)
    return node
