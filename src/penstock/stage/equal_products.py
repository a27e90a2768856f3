"""Weight gradients of equal small layers in a graph, done by one batched product, as the eager weight pass does them.

    batch_equal_products(part)     # in place: mm(t(g1), x1), mm(t(g2), x2), ... become one bmm, sum(g1), sum(g2), ... one sum

A small product costs less than calling it, and a graph whose products are calls of a library gains nothing from a compiler.
Only products that depend on no other such product are taken, so that they cannot depend on one another. As in
`penstock.stage.batched`, the bits are those of single products, which is tried once for each size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.passes.tools_common import legalize_graph

from penstock.stage.batched import MOST_BYTES, MOST_PRODUCTS, same_bits

_aten = torch.ops.aten


class _Product(NamedTuple):
    """The gradient of a linear layer's weight: ``grad.t() @ rows``; and that of its bias, ``grad.sum(0)``."""

    node: fx.Node
    grad: fx.Node
    rows: fx.Node
    total: fx.Node | None


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
            product.node.replace_all_uses_with(_made(graph, _aten.select.int, products, 0, place))
            if totals is not None and product.total is not None:
                product.total.replace_all_uses_with(_made(graph, _aten.select.int, totals, 0, place))


def _stacked(graph: fx.Graph, nodes: list[fx.Node]) -> fx.Node:
    rows, columns = nodes[0].meta["val"].shape
    return _made(graph, _aten.view.default, _made(graph, _aten.cat.default, nodes), [len(nodes), rows, columns])


def _made(graph: fx.Graph, target: Callable[..., Any], *args: Any) -> fx.Node:
    """A node, with the fake tensor that it gives: backends look at that."""
    node = graph.call_function(target, args)
    values = fx.node.map_arg(args, lambda given: given.meta["val"])
    node.meta["val"] = target(*values)
    return node
