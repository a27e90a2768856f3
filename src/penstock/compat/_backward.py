"""`torch.distributed.pipelining._backward`: a backward in two parts, over any graph.

penstock's own stages defer the weight work of their layers while they run (`penstock.stage.deferred`), which is quicker. The
functions here take a graph that exists already. The input pass also finds the gradients at the *joints*, the nodes of the input's
path at which a parameter's own path ends; the weight pass starts from them. Gradients are accumulated by autograd, so hooks
fire; a parameter that no input reaches is not forgotten.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from penstock.compat._siblings import found_in
from penstock.errors import StageError
from penstock.nest import Value

__getattr__ = found_in(__name__)
Group = dict[str, Any]  # "params": tensors; "intermediates": joints; "grads": what arrived at each joint


def stage_backward(
    stage_output: Value,
    output_grads: Value,
    input_values: Sequence[Value],
    outputs_with_grads_idxs: Sequence[int] | None = None,
) -> tuple[Tensor | None, ...]:
    """Differentiate everything; the gradients of the inputs come back, those of the parameters accumulate."""
    if outputs_with_grads_idxs is not None:
        stage_output = [stage_output[place] for place in outputs_with_grads_idxs]
        output_grads = [output_grads[place] for place in outputs_with_grads_idxs]
    pairs = list(_pairs(stage_output, output_grads))
    if pairs:
        torch.autograd.backward([root for root, _ in pairs], grad_tensors=[grad for _, grad in pairs])
    return tuple(map(take_grad, input_values))


def _pairs(output: Value, grad: Value) -> Iterable[tuple[Value, Tensor | None]]:
    """The tensors of an output that require a gradient, each with its own."""
    if isinstance(output, (Tensor, GradientEdge)):
        if not isinstance(output, Tensor) or output.requires_grad:
            yield output, grad
    elif isinstance(output, dict) and grad is not None:
        if output.keys() != grad.keys():
            raise StageError(f"an output has the keys {list(output)}, its gradients {list(grad)}; expected the same")
        yield from _pairs([*output.values()], [grad[key] for key in output])
    elif isinstance(output, (list, tuple)) and grad is not None:
        if len(output) != len(grad):
            raise StageError(f"{len(output)} outputs and {len(grad)} gradients; expected as many")
        for part, one in zip(output, grad, strict=True):
            yield from _pairs(part, one)


def grad_of(value: Value) -> Tensor | None:
    """The gradient that an input has gathered."""
    return value.grad if isinstance(value, Tensor) and (value.is_leaf or value.retains_grad) else None


def take_grad(value: Value) -> Tensor | None:
    """The same, taken from it."""
    grad = grad_of(value)
    if grad is not None:
        value.grad = None
    return grad


def stage_backward_input(
    stage_outputs_or_loss: Sequence[Value],
    output_grads: Sequence[Tensor | None] | None,
    input_values: Sequence[Value],
    weights: Iterable[Tensor],
) -> tuple[tuple[Tensor | None, ...], list[Group]]:
    """The gradients of the inputs, also added to their `.grad`, and what the weight pass needs."""
    given = [None] * len(stage_outputs_or_loss) if output_grads is None else output_grads
    pairs = list(_pairs(list(stage_outputs_or_loss), given))
    roots: list[Any] = [root for root, _ in pairs]
    grads = [torch.ones_like(root) if grad is None else grad for root, grad in pairs]
    inputs = [value for value in input_values if isinstance(value, Tensor) and value.requires_grad]
    groups = _groups([_edge(root).node for root in roots], [_edge(value).node for value in inputs], list(weights))
    joints = {joint: len(joint._input_metadata) for group in groups for joint in group["intermediates"]}
    edges = (GradientEdge(joint, place) for joint, size in joints.items() for place in range(size))
    wanted: list[Any] = [*inputs, *edges]
    found: Sequence[Tensor | None] = [None] * len(wanted)
    if roots and wanted:
        found = torch.autograd.grad(roots, wanted, grads, retain_graph=True, allow_unused=True)
    by_input = {id(value): grad for value, grad in zip(inputs, found, strict=False)}
    arrived = iter(found[len(inputs) :])
    noted = {joint: tuple(islice(arrived, size)) for joint, size in joints.items()}
    for group in groups:
        group["grads"] = [noted[joint] for joint in group["intermediates"]]
    for value in inputs:
        if by_input[id(value)] is not None:
            value.grad = _null_coalesce_accumulate(value.grad, by_input[id(value)])
    return tuple(by_input.get(id(value)) for value in input_values), groups


def stage_backward_weight(
    weights: Iterable[Tensor], param_groups: Sequence[Group], retain_graph: bool = False
) -> tuple[Tensor | None, ...]:
    """Accumulate the gradients of the parameters; what they were before comes back."""
    before = tuple(weight.grad for weight in weights)
    # Behind several joints the paths of groups may have nodes in common, whose graph all but the last must leave as it is.
    crossing = any(len(group["intermediates"]) > 1 for group in param_groups)
    for number, group in enumerate(param_groups, 1):
        joints, noted = group.pop("intermediates"), group.pop("grads")
        edges = [
            (GradientEdge(joint, place), grad)
            for joint, grads in zip(joints, noted, strict=True)
            for place, grad in enumerate(grads or ())
            if grad is not None
        ]
        if not edges:
            continue
        with ExitStack() as hooks:
            if len(joints) > 1:  # a joint behind another one would be reached twice
                for joint, grads in zip(joints, noted, strict=True):
                    hooks.callback(joint.register_prehook(lambda arrived, noted=grads: noted or arrived).remove)
            torch.autograd.backward(
                [edge for edge, _ in edges],
                grad_tensors=[grad for _, grad in edges],
                inputs=group["params"],
                retain_graph=retain_graph or (crossing and number < len(param_groups)),
            )
    return before


def _edge(value: Value) -> GradientEdge:
    return value if isinstance(value, GradientEdge) else get_gradient_edge(value)


def _groups(roots: list[Node], inputs: list[Node], weights: list[Tensor]) -> list[Group]:
    """The parameters, grouped by the joints at which their paths meet those of the inputs."""
    users: defaultdict[Node, list[Node]] = defaultdict(list)  # the nodes that hand their gradients to each

    def below(node: Node) -> Iterator[Node]:
        for following, _ in node.next_functions:
            if following is not None:
                users[following].append(node)
                yield following

    _reached(roots, below)
    path = _reached(inputs, lambda node: users.get(node, ())) | set(roots)
    groups: list[Group] = []
    for weight in weights:
        if not weight.requires_grad:
            continue
        node = _edge(weight).node
        if node not in users and node not in roots:
            continue
        joints = _reached([node], lambda node: () if node in path else users.get(node, ())) & path
        met = [group for group in groups if not joints.isdisjoint(group["intermediates"])]
        groups = [group for group in groups if joints.isdisjoint(group["intermediates"])]
        params = [param for group in met for param in group["params"]]
        others = [joint for group in met for joint in group["intermediates"]]
        groups.append({"params": [*params, weight], "intermediates": [*dict.fromkeys([*others, *joints])]})
    return groups


def _reached(nodes: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """These nodes, those that follow them, and so on."""
    reached = set(nodes)
    stack = list(reached)
    while stack:
        new = set(following(stack.pop())) - reached
        reached |= new
        stack += new
    return reached


def _null_coalesce_accumulate(lhs: Tensor | None, rhs: Tensor | None) -> Tensor | None:
    """The sum of what is there."""
    if lhs is None or rhs is None:
        return rhs if lhs is None else lhs
    return lhs + rhs
