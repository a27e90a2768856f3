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
has compiled is cut in two as a graph: see `penstock.stage.compiled`. The weight pass hands
its gradients to the engine with the parameters as roots, so that hooks fire and accumulation is autograd's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from penstock.errors import StageError
from penstock.stage.batched import Group, accumulate, accumulate_batches, trained
from penstock.stage.calls import Work
from penstock.stage.cut_graph import GraphWork, accumulate_graphs, collecting, weight_gradients
from penstock.stage.deferred import Again, Deferral, Pending, Phases
from penstock.stage.engine import capture, leaves_reached, nodes_reached, run_engine, seeds
from penstock.stage.forward import run_deferred
from penstock.stage.intercept import ROOT, begin, end, visible_to_engine_threads

__all__ = ["Deferral", "Pending", "run_deferred"]  # beside what is defined here


class ManualWeight(Phases):
    """Weight work made by hand: `dw_builder()` is called after each input pass and returns what the weight pass runs.

    >>> log = []
    >>> manual = ManualWeight(lambda: lambda: log.append("dW"))
    >>> x = torch.ones(1, requires_grad=True)
    >>> backward_input([x * 2], [torch.ones(1)], manual, inputs=[x])
    >>> backward_weight(manual)
    >>> log
    ['dW']
    """

    def __init__(self, dw_builder: Callable[[], Callable[[], None]]) -> None:
        if not callable(dw_builder):
            raise StageError(
                f"dw_builder must be a function that returns the weight work, got {dw_builder!r}; "
                "write `dw_builder=lambda: my_weight_work`"
            )
        self.builder = dw_builder

    def build(self) -> None:
        """After the input pass: ask for the weight work of this microbatch, which `run` does."""
        runner = self.builder()
        if not callable(runner):
            raise StageError(
                f"dw_builder must return a function without arguments that does the weight work, got {runner!r}; "
                "write `def dw_builder(): return my_weight_work`, not `return my_weight_work()`"
            )
        self.run: Callable[[], None] = runner


def can_split(module: nn.Module) -> bool:
    """Whether the weight work of `module` can be put off; False if a part of it was scripted."""
    return not any(isinstance(part, torch.jit.ScriptModule) for part in module.modules())


def run_backward_full(outputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Everything at once. An output whose gradient is None takes no part, unless it is a loss: a single number."""
    roots, given = seeds(outputs, grads)
    if roots:
        run_engine(roots, given)


def backward_input(
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    pending: Pending | ManualWeight,
    *,
    inputs: Sequence[Tensor],
) -> None:
    """Gradients of `inputs`, found in their `.grad` afterwards. What can wait is left in `pending`.

    If no input needs a gradient there is nothing to hurry for: all of it waits.
    """
    roots, given = seeds(outputs, grads)
    pending.advance("input", expected="forward", verb="backward_input")
    if isinstance(pending, ManualWeight):
        if roots:
            run_engine(roots, given)
        pending.build()
        return
    if not roots:
        pending.records = []
        return
    for tensor in inputs:
        if tensor.requires_grad:
            _differentiate(roots, given, pending, inputs)
            return
    pending.kept = roots, given


def backward_weight(pending: Pending | ManualWeight) -> None:
    """Gradients of the parameters that the input pass left out. Consumes `pending`."""
    pending.advance("weight", expected="input", verb="backward_weight")
    if isinstance(pending, ManualWeight):
        pending.run()
        return
    if pending.kept is not None:
        (roots, given), pending.kept = pending.kept, None
        _differentiate(roots, given, pending, ())
    work, pending.work = pending.work, []
    batches, pending.batches = pending.batches, []
    again, pending.again = pending.again, None
    if pending.graphs:
        compiled = pending.deferral.compiled
        if compiled is not None and (compiled.shared or work or batches) and again is None:
            accumulate(work, *_of_graphs_and_batches(pending.graphs, batches))
            return
        accumulate_graphs(pending.graphs, None if compiled is None else compiled.listeners)
    if again is not None:
        _accumulate_all(work, again, pending)
        return
    if batches:
        accumulate_batches(batches)
    if work:
        accumulate(work)


def _of_graphs_and_batches(
    graphs: list[GraphWork], batches: list[tuple[Group, Tensor, Tensor]]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Parameters and gradients of both, for one call of the engine: some parameter may be in both, and its hooks fire once."""
    roots, grads = weight_gradients(graphs)
    for group, rows, row_grads in batches:
        roots += group.parameters
        grads += group.gradients(rows, row_grads)
    return trained(roots, grads)


def _differentiate(
    roots: tuple[Tensor, ...],
    grads: tuple[Tensor, ...],
    pending: Pending,
    inputs: Sequence[Tensor],
    *,
    cut: bool = False,
) -> None:
    deferral = pending.deferral
    if deferral.compiled is not None and not cut:
        with collecting() as pending.graphs:
            _differentiate(roots, grads, pending, inputs, cut=True)
        return
    if not pending.deferred:
        run_engine(roots, grads)
        return
    mixed = (deferral.news or pending.skip is not deferral.skip) and _used_otherwise(roots, pending)
    previous = begin(pending)
    try:
        if mixed:
            _capture_inputs(roots, grads, pending, inputs)
        elif roots[0].is_cpu:
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


def _used_otherwise(roots: tuple[Tensor, ...], pending: Pending) -> bool:
    """Whether some deferred weight is also used by an operator that is not; it is no longer deferred then.

    Asked once for each weight: the graph of a stage is taken to use its weights alike for each microbatch.
    """
    checked = pending.deferral.checked
    calls = pending.calls()
    pending.deferral.news = False
    if pending.skip is not pending.deferral.skip and any(
        id(used) in pending.deferral.skip for call in calls for used in (call.weight, call.bias)
    ):
        return not _recomputes_reentrantly(roots)
    news = [call for call in calls if id(call.weight) not in checked]
    if not news:
        return False
    used: dict[int, Tensor] = {id(call.weight): call.weight for call in news}
    checked.update(used)
    used.update({id(call.bias): call.bias for call in news if call.bias is not None})
    found = {key: used[key] for key in leaves_reached(roots) & used.keys()}
    if found:
        # From the next microbatch on. Those in flight keep their view, so that recomputation repeats the forward.
        pending.deferral.skip = {**pending.deferral.skip, **found}
        pending.deferral.reset()
    return bool(found) and not _recomputes_reentrantly(roots)


def _recomputes_reentrantly(roots: tuple[Tensor, ...]) -> bool:
    """Reentrant checkpoints refuse an input pass that does not accumulate; hooks then fire twice, this one time."""
    return any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes_reached(roots))


def _capture_inputs(
    roots: tuple[Tensor, ...], grads: tuple[Tensor, ...], pending: Pending, inputs: Sequence[Tensor]
) -> None:
    """The input pass without accumulation, for a microbatch found to use a deferred weight in two ways.

    All its parameters then accumulate in the weight pass, in one engine call, so that each hook fires once.
    """
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    anchors = pending.anchors()
    found = capture(roots, grads, inputs=(*leaves, *anchors, ROOT))
    for leaf, grad in zip(leaves, found, strict=False):  # another stage of this rank may have added its part already
        if grad is not None:
            leaf.grad = grad if leaf.grad is None else leaf.grad + grad
    for anchor, grad in zip(anchors, found[len(leaves) :], strict=False):
        anchor.grad = grad
    pending.again = Again(roots, grads, (*leaves, *anchors))


def _accumulate_all(work: list[Work], again: Again, pending: Pending) -> None:
    """Leaves of penstock's own would receive their gradients a second time: they are shielded."""
    old = [leaf.grad for leaf in again.shielded]
    for leaf in again.shielded:
        leaf.grad = None
    previous = begin(pending)  # what is recomputed must be as it was in the forward
    try:
        with collecting():  # compiled parts have left their weight work already
            accumulate(list(work), again.roots, again.grads)
    finally:
        end(previous)
        pending.records, pending.functions = [], []
        for leaf, grad in zip(again.shielded, old, strict=True):
            leaf.grad = grad
