"""From what export returns to a list of nodes with cut positions.

    flat = flatten(traced)  # the same, and
    flat.nodes              # operators in order, without marks and checks
    flat.marks              # before which node each mark stood, and what the mark was

A region (autocast, no_grad) stays one node unless a mark stands inside it; then its body is put into the list, each
node remembering the region, and the cutter wraps what ends up in one stage again. Checkpoints, which export does not
know, are regions that are always open.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from penstock.capture.export import Traced
from penstock.capture.marks import CHECKPOINT_BEGIN, CHECKPOINT_END, Mark, mark
from penstock.errors import CaptureError

REGION = "penstock_region"  # meta key: a tuple of (number, operator, leading arguments), outermost first

SIZE = "penstock_size"  # meta key: the node is a size, and may be read anywhere after its tensor


def flatten(traced: Traced, wanted: Sequence[str] = ()) -> Traced:
    """Opens regions with marks inside, takes marks and checks out of the graph. `wanted`: more nodes to cut before."""
    numbers = count()
    for node in list(traced.graph.nodes):
        if is_region(node) and _cleaned(node, traced.root):
            _open(node, traced.root, numbers, ())
    nodes: list[fx.Node] = []
    marks: list[Mark] = []
    inside: tuple[object, ...] = ()
    for node in list(traced.graph.nodes):
        if node.op in ("placeholder", "output"):
            continue
        if node.name in wanted:
            marks.append(Mark(len(nodes), f"the policy's mark before {node.name}"))
        if node.target is mark:
            what = str(node.args[0])
            if what == CHECKPOINT_BEGIN:
                inside = ((next(numbers), checkpointed, ()),)
            elif what == CHECKPOINT_END:
                inside = ()
            else:
                marks.append(Mark(len(nodes), what))
            traced.graph.erase_node(node)
        elif node.target in _CHECKS:
            traced.graph.erase_node(node)
        else:
            nodes.append(node)
            if inside:
                node.meta[REGION] = (*inside, *node.meta.get(REGION, ()))
    return replace(traced, nodes=nodes, marks=tuple(marks))


def _cleaned(node: fx.Node, root: nn.Module | None) -> bool:
    """Take checks and checkpoints out of what a region runs; whether a mark for a cut stands in it."""
    marked = False
    for body in bodies(node, root):
        for inner in list(body.nodes):
            if inner.target in _CHECKS or (
                inner.target is mark and inner.args[0] in (CHECKPOINT_BEGIN, CHECKPOINT_END)
            ):
                body.erase_node(inner)
            elif inner.target is mark or (is_region(inner) and _cleaned(inner, body.owning_module)):
                marked = True
    return marked


def _open(node: fx.Node, root: fx.GraphModule, numbers: count[int], outer: tuple[object, ...]) -> None:
    """Put the body of a region in place of the region."""
    args = list(node.args)
    where = next((i for i, a in enumerate(args) if isinstance(a, fx.Node) and a.op == "get_attr"), None)
    whole = any(user.target is not operator.getitem for user in node.users)
    if where is None or whole or any(isinstance(a, fx.Node) for a in args[:where]) or len(bodies(node, root)) != 1:
        raise CaptureError(
            f"a split mark stands inside {node.target}, a region that cannot be cut{', since its result is used whole' * whole}; "
            "move the mark outside"
        )
    body = bodies(node, root)[0]
    tag = (*outer, (next(numbers), node.target, tuple(args[:where])))
    graph = node.graph
    values: dict[fx.Node, fx.Node] = {}
    given = iter(args[where + 1 :])
    with graph.inserting_before(node):
        for inner in body.nodes:
            if inner.op == "placeholder":
                values[inner] = next(given)  # type: ignore[assignment]
            elif inner.op == "output":
                results = inner.args[0]
            else:
                made = values[inner] = graph.node_copy(inner, lambda n: values[n])
                made.meta[REGION] = tag
                if inner.op == "get_attr" and body.owning_module is not root:
                    made.target = f"{inner.target}_of_{made.name}"
                    setattr(root, made.target, getattr(body.owning_module, str(inner.target)))
    for user in list(node.users):
        user.replace_all_uses_with(values[results[user.args[1]]])
        graph.erase_node(user)
    graph.erase_node(node)
    for copied in list(values.values()):
        if isinstance(copied, fx.Node) and is_region(copied) and _cleaned(copied, root):
            _open(copied, root, numbers, tag)


aten = torch.ops.aten

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_SIZE_OPS = {aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default}
_CHECKS = {  # assertions that export adds: they fix devices and dtypes, and compute nothing
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}
_NORMS = {aten.batch_norm.default, aten.instance_norm.default}


def is_size(node: fx.Node) -> bool:
    """A traced size: reading one from a tensor, or arithmetic on sizes."""
    if node.op != "call_function":
        return False
    if node.target in _SIZE_OPS:
        return True
    return isinstance(node.meta.get("val"), _SYMBOLIC) and all(is_size(arg) for arg in node.all_input_nodes)


def is_region(node: fx.Node) -> bool:
    """A higher-order operator: its body is a graph of its own."""
    return node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator)


def bodies(node: fx.Node, root: torch.nn.Module | None) -> list[fx.Graph]:
    """The graphs that a region runs."""
    return [inner.graph for arg in node.all_input_nodes if (inner := body_module(arg, root)) is not None]


def body_module(node: fx.Node, root: torch.nn.Module | None) -> fx.GraphModule | None:
    """The module behind a get_attr node, when it is the body of a region."""
    if node.op != "get_attr":
        return None
    inner = getattr(root, str(node.target), None)
    return inner if isinstance(inner, fx.GraphModule) else None


def is_pure(node: fx.Node, root: torch.nn.Module) -> bool:
    """May be computed anywhere, any number of times: not random, writes nothing."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or written(node):
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return len(node.target._schema.returns) > 0 and torch.Tag.nondeterministic_seeded not in node.target.tags
    if is_region(node):
        inner = bodies(node, root)
        nodes = [(n, graph.owning_module or root) for graph in inner for n in graph.nodes]
        return bool(inner) and all(n.op in ("placeholder", "output") or is_pure(n, owner) for n, owner in nodes)
    return node.target is operator.getitem or is_size(node)


def written(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operator writes to."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target is aten.detach_.default:
        return []
    # batch norm writes its running statistics although its schema does not say so
    if node.target in _NORMS:
        statistics = (_argument(node, 3, "running_mean"), _argument(node, 4, "running_var"))
        return [a for a in statistics if isinstance(a, fx.Node)] if _argument(node, 5, "training") else []
    return _aliased(node, lambda info: info.is_write)


def shares_memory(node: fx.Node) -> list[fx.Node]:
    """The arguments of which the result may be a view."""
    if node.target is operator.getitem:
        return [node.args[0]] if isinstance(node.args[0], fx.Node) else []
    if not isinstance(node.target, torch._ops.OpOverload) or node.target in _NORMS:
        return []
    if torch.Tag.maybe_aliasing_or_mutating in node.target.tags:  # dropout that is off returns what it was given
        return node.all_input_nodes[:1]
    if all(r.alias_info is None for r in node.target._schema.returns):
        return []
    return _aliased(node, lambda info: True)


def _aliased(node: fx.Node, wanted: Callable[[Any], bool]) -> list[fx.Node]:
    """The arguments that an operator's schema marks as written to, or as shared with its result."""
    found = []
    for i, arg in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if arg.alias_info is not None and wanted(arg.alias_info):
            value = _argument(node, i, arg.name)
            found += [v for v in (value if isinstance(value, list | tuple) else (value,)) if isinstance(v, fx.Node)]
    return found


def _argument(node: fx.Node, position: int, name: str) -> object:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def checkpointed(body: Callable[..., object], *args: object) -> object:
    """Run a part of a stage without keeping what its backward needs; the backward computes it again."""
    return checkpoint(body, *args, use_reentrant=False)
