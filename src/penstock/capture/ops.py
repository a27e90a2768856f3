"""What capture must know about single operators: is it random, does it write, what may share memory, is it a size."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_SIZE_OPS = {aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default}
_CHECKS = {
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}
_NORMS = {aten.batch_norm.default, aten.instance_norm.default}


def is_check(node: fx.Node) -> bool:
    """An assertion that export adds; it fixes devices and dtypes, and computes nothing."""
    return node.target in _CHECKS


def is_size(node: fx.Node) -> bool:
    """A traced size: reading one from a tensor, or arithmetic on sizes."""
    if node.op != "call_function":
        return False
    if node.target in _SIZE_OPS:
        return True
    return isinstance(node.meta.get("val"), _SYMBOLIC) and all(is_size(arg) for arg in node.all_input_nodes)


def is_random(node: fx.Node) -> bool:
    """Draws from the random state, or might."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def is_region(node: fx.Node) -> bool:
    """A higher-order operator: its body is a graph of its own."""
    return node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator)


def bodies(node: fx.Node, root: torch.nn.Module | None) -> list[fx.Graph]:
    """The graphs that a region runs."""
    found = []
    for arg in node.all_input_nodes:
        if arg.op == "get_attr":
            inner = getattr(root, str(arg.target), None)
            if isinstance(inner, fx.GraphModule):
                found.append(inner.graph)
    return found


def body_module(node: fx.Node, root: torch.nn.Module) -> fx.GraphModule | None:
    """The module behind a get_attr node, when it is the body of a region."""
    if node.op != "get_attr":
        return None
    inner = getattr(root, str(node.target), None)
    return inner if isinstance(inner, fx.GraphModule) else None


def is_pure(node: fx.Node, root: torch.nn.Module) -> bool:
    """May be computed anywhere, any number of times: not random, writes nothing."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or is_random(node) or written(node):
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return len(node.target._schema.returns) > 0
    if is_region(node):
        inner = bodies(node, root)
        return bool(inner) and all(
            is_pure(n, graph.owning_module or root)
            for graph in inner
            for n in graph.nodes
            if n.op not in ("placeholder", "output")
        )
    return node.target is operator.getitem or is_size(node)


def written(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operator writes to."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target is aten.detach_.default:
        return []
    found = []
    # batch norm writes its running statistics although its schema does not say so
    if node.target in _NORMS:
        if _argument(node, 5, "training"):
            found = [
                a for a in (_argument(node, 3, "running_mean"), _argument(node, 4, "running_var")) if a is not None
            ]
        return [a for a in found if isinstance(a, fx.Node)]
    for i, arg in enumerate(node.target._schema.arguments):
        if arg.alias_info is not None and arg.alias_info.is_write:
            value = _argument(node, i, arg.name)
            found += [v for v in (value if isinstance(value, list | tuple) else (value,)) if isinstance(v, fx.Node)]
    return found


def shares_memory(node: fx.Node) -> list[fx.Node]:
    """The arguments of which the result may be a view."""
    if node.target is operator.getitem:
        return [node.args[0]] if isinstance(node.args[0], fx.Node) else []
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    if node.target in _NORMS:
        return []
    if torch.Tag.maybe_aliasing_or_mutating in node.target.tags:  # dropout that is off returns what it was given
        return node.all_input_nodes[:1]
    schema = node.target._schema
    if all(r.alias_info is None for r in schema.returns):
        return []
    found = []
    for i, arg in enumerate(schema.arguments):
        value = _argument(node, i, arg.name)
        if arg.alias_info is not None:
            found += [v for v in (value if isinstance(value, list | tuple) else (value,)) if isinstance(v, fx.Node)]
    return found


def _argument(node: fx.Node, position: int, name: str) -> Any:
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(name)
