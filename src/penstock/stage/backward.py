"""The backward of one microbatch through one stage: in one piece, or an input pass and a weight pass.

>>> layer = torch.nn.Linear(2, 1)
>>> x = torch.ones(3, 2, requires_grad=True)
>>> loss, pending = run_deferred(Deferral(layer), lambda x: layer(x).sum(), (x,), {})
>>> backward_input([loss], [None], pending, inputs=[x])
>>> x.grad is not None, layer.weight.grad is None
(True, True)
>>> backward_weight(pending)
>>> layer.weight.grad
tensor([[3., 3.]])

The input pass is one engine call over the whole graph. Parameters of linear layers wait for the weight pass, all others
(norms, embeddings, convolutions) accumulate in the input pass. What torch.compile
has compiled is cut in two as a graph: see `penstock.backward.split_backend`. The weight pass hands
its gradients to the engine with the parameters as roots, so that hooks fire and accumulation is autograd's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from penstock.nest import Value
from penstock.stage.batched import accumulate, accumulate_batches, trained
from penstock.stage.buffers import remember
from penstock.stage.deferred import Deferral, Pending
from penstock.stage.engine import capture, leaves_reached, nodes_reached, run_engine, seeds
from penstock.stage.intercept import ROOT, NestedDifferentiation, begin, end, visible_to_engine_threads

__all__ = ["Deferral", "Pending"]  # beside what is defined here


def can_split(module: nn.Module) -> bool:
    """Whether the weight work of `module` can be put off; False if a part of it was scripted."""
    return not any(isinstance(part, torch.jit.ScriptModule) for part in module.modules())


def run_deferred(
    deferral: Deferral, module: Callable[..., Value], args: Sequence[object], kwargs: dict[str, object]
) -> tuple[Value, Pending]:
    """The forward of a stage whose backward will be split: its value, and the weight work that it began.

    A module that differentiates through its own layers (forces as the gradient of an energy) cannot be split. Its first
    forward shows that; it is then run again, from the same random state and the same buffers, and never split again.
    """
    pending = Pending(deferral)
    if not deferral.enabled or deferral.looking or not _may_need_input_gradients(args, kwargs):
        return module(*args, **kwargs), pending
    rewind = None if deferral.proved else remember(module, args)
    previous = begin(pending)
    try:
        value = module(*args, **kwargs)
        deferral.proved = deferral.proved or torch.is_grad_enabled()
        return value, pending
    except NestedDifferentiation:
        if rewind is None:
            raise
        deferral.enabled = False
    finally:
        end(previous)
    rewind()
    return module(*args, **kwargs), Pending(deferral)


def _may_need_input_gradients(args: Sequence[object], kwargs: dict[str, object]) -> bool:
    """False if there is nothing to hurry for: all of the backward then waits for the weight pass, in one piece."""
    for value in args if not kwargs else (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            if value.requires_grad:
                return True
        elif not isinstance(value, _CONSTANTS):
            return True  # a nest, which is not searched
    return False


_CONSTANTS = (type(None), bool, int, float, str)


def run_backward_full(outputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Everything at once. An output whose gradient is None takes no part, unless it is a loss: a single number."""
    roots, given = seeds(outputs, grads)
    if roots:
        run_engine(roots, given)


def backward_input(
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    pending: Pending,
    *,
    inputs: Sequence[Tensor],
) -> None:
    """Gradients of `inputs`, found in their `.grad` afterwards. What can wait is left in `pending`.

    If no input needs a gradient there is nothing to hurry for: all of it waits.
    """
    input_pass(*seeds(outputs, grads), pending, needed=any(tensor.requires_grad for tensor in inputs))


def input_pass(
    roots: tuple[Tensor | GradientEdge, ...], grads: tuple[Tensor, ...], pending: Pending, *, needed: bool
) -> None:
    """The same from tensors or edges that have a gradient; `needed` says whether an input needs one."""
    pending.advance("input", expected="forward", verb="backward_input")
    if not roots:
        pending.records = []
    elif needed:
        _differentiate(roots, grads, pending)
    else:
        pending.kept = roots, grads


def backward_weight(pending: Pending) -> None:
    """Gradients of the parameters that the input pass left out. Consumes `pending`."""
    pending.advance("weight", expected="input", verb="backward_weight")
    if pending.kept is not None:
        (roots, given), pending.kept = pending.kept, None
        _differentiate(roots, given, pending)
    work, pending.work = pending.work, []
    batches, pending.batches = pending.batches, []
    if pending.graphs:
        # Some parameter may be in several of these, and its hooks fire once.
        parameters: list[Tensor] = []
        grads: list[Tensor] = []
        with torch.no_grad():
            while pending.graphs:
                used, found = pending.graphs.pop().gradients()
                parameters += used
                grads += found
        for group, rows, row_grads in batches:
            parameters += group.parameters
            grads += group.gradients(rows, row_grads)
        accumulate(work, *trained(parameters, grads))
        return
    if batches:
        accumulate_batches(batches)
    if work:
        accumulate(work)


def _differentiate(roots: tuple[Tensor | GradientEdge, ...], grads: tuple[Tensor, ...], pending: Pending) -> None:
    deferral = pending.deferral
    if not pending.deferred:
        run_engine(roots, grads)
        return
    mixed = (deferral.news or pending.skip is not deferral.skip) and _used_otherwise(roots, pending)
    previous = begin(pending)
    try:
        if mixed:
            _accumulate_all(roots, grads, pending)
            return
        if grads[0].is_cpu:
            run_engine(roots, grads)
        else:
            with visible_to_engine_threads(pending):
                run_engine(roots, grads)
        pending.harvest()
    except BaseException:
        deferral.reset()
        raise
    finally:
        end(previous)


def _used_otherwise(roots: tuple[Tensor | GradientEdge, ...], pending: Pending) -> bool:
    """Whether some deferred parameter is also used by an operator that is not; it is no longer deferred then.

    Asked once for each parameter: the graph of a stage is taken to use them alike for each microbatch.
    """
    deferral = pending.deferral
    deferral.news = False
    calls = pending.calls()
    if pending.skip is deferral.skip and not [call for call in calls if id(call.weight) not in deferral.checked]:
        return False
    used = {id(tensor): tensor for call in calls for tensor in call[:2] if tensor is not None}
    if used.keys().isdisjoint(deferral.skip):
        news = used.keys() - deferral.checked.keys()
        deferral.checked.update(used)
        found = leaves_reached(roots) & news if news else news
        if not found:
            return False
        # From the next microbatch on. Those in flight keep their view, so that recomputation repeats the forward.
        deferral.skip = {**deferral.skip, **{key: used[key] for key in found}}
        deferral.reset()
    # Reentrant checkpoints refuse an input pass that does not accumulate; hooks then fire twice, this one time.
    return not any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes_reached(roots))


def _accumulate_all(roots: tuple[Tensor | GradientEdge, ...], grads: tuple[Tensor, ...], pending: Pending) -> None:
    """The whole backward of a microbatch that was found to use a deferred weight in two ways: what the deferred calls need is
    looked for first, so that all of its parameters accumulate in one engine call, and each hook fires once."""
    anchors = pending.anchors()
    from functorch.compile import config  # type: ignore[import-untyped]

    with config.patch(donated_buffer=False):  # else torch refuses to run compiled graphs twice
        found = capture(roots, grads, inputs=(*anchors, ROOT))
    pending.graphs.clear()  # compiled parts before the first deferred call have not run yet; all of them run below
    for anchor, grad in zip(anchors, found, strict=False):
        anchor.grad = grad
    pending.harvest(in_groups=False)
    accumulate(list(pending.work), roots, grads)
    pending.work, pending.records, pending.functions = [], [], []
    for anchor in anchors:
        anchor.grad = None
