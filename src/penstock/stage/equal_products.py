"""Weight gradients of equal small layers in a graph, done by one batched product, as the eager weight pass does them.

    batch_equal_products(part)     # in place: mm(t(g1), x1), mm(t(g2), x2), ... become one bmm, sum(g1), sum(g2), ... one sum
    packing = pack_outputs(part)   # and the graph returns these as they are; unpack(packing, values) takes them apart

A small product costs less than calling it, and a graph whose products are calls of a library gains nothing from a compiler.
Only products that depend on no other such product are taken, so that they cannot depend on one another. As in
`penstock.stage.batched`, the bits are those of single products, which is tried once for each size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.passes.tools_common import legalize_graph

from penstock.nest import Value
from penstock.stage.batched import MOST_PRODUCTS, ProductSize, in_groups

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)
_BATCH = "penstock.stage.equal_products"  # marks a part of a batch


class _Product(NamedTuple):
    """The gradient of a linear layer's weight: ``grad.t() @ rows``; and that of its bias, ``grad.sum(0)``."""

    node: fx.Node
    grad: fx.Node
    rows: fx.Node
    total: fx.Node | None
    size: ProductSize


class GradientBatch(NamedTuple):
    """A value that a graph returns: gradients that lie one behind another in one tensor, or a gradient alone."""

    places: tuple[int, ...]  # among all gradients
    shape: tuple[int, ...] = ()  # of each of several

    def unpack(self, value: Tensor) -> tuple[Tensor, ...]:
        if len(self.places) == 1:
            return (value,)
        return value.reshape(len(self.places), *self.shape).unbind(0)


Packing = tuple[GradientBatch, ...]
"""What a graph returns, value by value."""


def unpack(packing: Packing, values: Sequence[Tensor]) -> list[Value]:
    """All gradients, in their order; None for one that there is not."""
    found: dict[int, Tensor] = {}
    for batch, value in zip(packing, values, strict=True):
        found.update(zip(batch.places, batch.unpack(value), strict=True))
    return [found[place] for place in range(len(found))]


def batch_equal_products(part: fx.GraphModule) -> None:
    """Do the products of each size at once."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    found = [product for node in part.graph.nodes if (product := _product(node)) is not None]
    later = {node for product in found for node in (product.node, product.total)}  # and what depends on one of these
    for node in part.graph.nodes:
        if any(given in later for given in node.all_input_nodes):
            later.add(node)
    free = [one for one in found if one.grad not in later and one.rows not in later]
    with (
        unset_fake_temporarily(),
        torch.no_grad(),
    ):  # sizes are tried with real tensors, while others trace with fake ones
        groups, _ = in_groups([one.size for one in free], free)
    for _, group in groups:
        _batch(part.graph, group)
    legalize_graph(part)  # a batch stands where its first product was, before what the others are made of
    part.graph.eliminate_dead_code()
    part.recompile()


def pack_outputs(part: fx.GraphModule) -> Packing:
    """Let the graph return batches as they are, where all of a batch is returned, each once."""
    (output,) = part.graph.find_nodes(op="output")
    grads: list[fx.Node | None] = list(output.args[0])
    found: dict[fx.Node, dict[int, int]] = {}  # by batch: the place of each of its gradients
    for place, grad in enumerate(grads):
        if grad is not None and grads.count(grad) == 1 and (taken := _taken_from(grad)) is not None:
            found.setdefault(taken[0], {})[taken[1]] = place
    batches: dict[GradientBatch, fx.Node | None] = {}
    for batch, numbers in found.items():
        places = tuple(numbers[number] for number in sorted(numbers))
        shapes = {tuple(grads[place].meta["val"].shape) for place in places}  # type: ignore[union-attr]
        if len(places) == batch.meta["val"].shape[0] and len(shapes) == 1:
            batches[GradientBatch(places, *shapes)] = batch
    batched = {place for batch in batches for place in batch.places}
    packed = {GradientBatch((place,)): grad for place, grad in enumerate(grads) if place not in batched} | batches
    output.args = (list(packed.values()),)
    part.graph.eliminate_dead_code()
    part.recompile()
    return tuple(packed)


def _taken_from(grad: fx.Node) -> tuple[fx.Node, int] | None:
    """The batch of which a gradient is a part, and which one."""
    node: Value = grad
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
    if not isinstance(grad, fx.Node) or not _is_plain(grad) or not _is_plain(rows):
        return None
    sums = [user for user in grad.users if user.target is _aten.sum.dim_IntList and user.args[1:] == ([0], True)]
    total = sums[0] if len(sums) == 1 and not sums[0].kwargs else None
    value, width = grad.meta["val"], rows.meta["val"].shape[1]
    size = value.shape[0], width, value.shape[1], value.dtype, value.device, total is not None
    return _Product(node, grad, rows, total, size) if 0 < value.numel() * width <= MOST_PRODUCTS else None


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
    return value.is_contiguous()


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
