"""Weight gradients of linear layers, put off: what one forward remembers, and what the weight pass makes of it.

A linear layer computes with an alias of its weight that needs no gradient, so that the input pass skips the weight. In
place of its bias stands an *anchor*: a leaf that looks like the bias repeated for every row. Autograd accumulates the
gradient of the layer's output in the anchor's `.grad` (it moves there, nothing is copied and no Python runs), whatever
happens to the output later: views, in-place activations, no use at all. A layer without bias gets an anchor of -0.0,
which changes no bit of a sum. The input and that gradient are all that the weight pass needs.

Anchors are kept from microbatch to microbatch: the n-th call of the forward finds them in the n-th `Slot`. That is safe
because an anchor's `.grad` is filled and emptied within one input pass.

Two cases go through an autograd function instead, which costs more: under saved-tensor hooks (non-reentrant
checkpointing, offloading) it lets the hooks have the input; and on devices other than CPU it leaves the kernel, and so
every bit of the forward, as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parameter import Parameter

from penstock.errors import StageError
from penstock.stage.batched import Group, Layout
from penstock.stage.engine import run_engine

Operator = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Computes (rows, frozen weight, bias or anchor) -> output, for rows of two dimensions."""

ENGINE_CALL_BYTES = 1 << 20
"""Weight gradients handed to the engine at once: enough to make its cost vanish, few enough to stay in the cache."""


class Call(NamedTuple):
    """Which parameters one call of a linear operator used, and how."""

    weight: Parameter
    bias: Tensor | None
    transposed: bool  # the weight is (inputs, outputs), as `addmm` takes it; `linear` takes (outputs, inputs)


Work = tuple[Call, Tensor, Tensor]
"""The weight work of one call, all that is kept between the passes: its rows and the gradients of its output rows."""


class Again(NamedTuple):
    """A backward that must accumulate together with the weight work, leaving `shielded` leaves alone."""

    roots: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]
    shielded: tuple[Tensor, ...]


class Slot:
    """The n-th linear call of a stage's forward, as the last microbatch left it."""

    __slots__ = (
        "anchor", "bias", "bias_pointer", "call", "cast", "dtype", "frozen", "output_shape", "rows_shape", "shape",
        "transposed", "versions", "weight", "weight_pointer",
    )  # fmt: skip

    def __init__(self, call: Call, x: Tensor, *, cast: torch.dtype | None) -> None:
        weight, bias, self.transposed = call
        self.call = call
        self.weight: Parameter | None = weight
        self.bias = bias
        self.shape = x.shape
        self.weight_pointer = weight.data_ptr()
        self.bias_pointer = 0 if bias is None else bias.data_ptr()
        self.cast = cast
        self.versions = _versions(weight, bias)
        self.frozen = weight.detach() if cast is None else weight.detach().to(cast)
        self.dtype = self.frozen.dtype
        width, features = weight.shape if self.transposed else (weight.shape[1], weight.shape[0])
        rows = x.numel() // width
        if bias is None:
            base = torch.full((), -0.0, dtype=self.dtype, device=weight.device)
        else:
            base = bias.detach().to(self.dtype)
        self.anchor = base.expand(rows, features).requires_grad_()
        self.rows_shape = None if x.dim() == 2 else (rows, width)
        self.output_shape = (*x.shape[:-1], features)

    def apply(self, operator: Operator, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and the rows to keep for the weight pass."""
        if self.cast is not None:
            x = x.to(self.cast)
        return _apply(operator, x, frozen=self.frozen, bias=self.anchor, fused=self.bias is None)


class _Nothing(Slot):
    """Stands behind the last slot and matches no call."""

    __slots__ = ()

    def __init__(self) -> None:
        self.weight = None


def _versions(weight: Tensor, bias: Tensor | None) -> tuple[int, int]:
    return weight._version, -1 if bias is None else bias._version


def _apply(operator: Operator, x: Tensor, *, frozen: Tensor, bias: Tensor | None, fused: bool) -> tuple[Tensor, Tensor]:
    """As torch does it for a weight that needs a gradient: one matrix product of rows, fused with the bias or not."""
    if x.dim() == 2:
        return operator(x, frozen, bias), x
    rows = x.reshape(-1, x.shape[-1])
    if fused or bias is None or x.is_contiguous():
        output = operator(rows, frozen, bias)
    else:
        output = operator(rows, frozen, None) + bias
    return output.view(*x.shape[:-1], output.shape[-1]), rows


class Deferral:
    """What a stage with a split backward keeps from microbatch to microbatch. One for each stage.

    `enabled` may be set to False: nothing is deferred then, and the input pass is the whole backward.
    """

    __slots__ = ("checked", "enabled", "last", "layout", "news", "proved", "repeats", "skip", "slots")

    def __init__(self, module: nn.Module | None = None) -> None:
        self.slots: list[Slot] = [_Nothing()]
        self.skip: dict[int, Parameter] = {} if module is None else _tied_outside_linear(module)
        self.checked: dict[int, Parameter] = {}
        self.last: list[Slot] = []  # of the last microbatch
        self.layout: Layout | None = None
        self.news = True  # a weight may have been deferred that is not checked yet
        self.repeats = False  # some weight is used twice
        self.enabled = True
        self.proved = False  # a forward has run without differentiating inside itself

    def reset(self) -> None:
        """Forget the anchors: after an input pass that failed half-way some of them hold gradients."""
        self.slots, self.last, self.layout = [_Nothing()], [], None

    def place(self, slot: Slot, *, at: int, slots: list[Slot]) -> None:
        """Put a new slot where the old one did not match."""
        self.news = True
        if any(other.weight is slot.weight for other in slots):
            self.repeats = True
        if slots[at].weight is None:
            slots.insert(at, slot)
        else:
            slots[at] = slot

    def stop_deferring(self, weights: dict[int, Parameter]) -> None:
        """From the next microbatch on. Those in flight keep their view, so that recomputation repeats the forward."""
        self.skip = {**self.skip, **weights}
        self.reset()


def _tied_outside_linear(module: nn.Module) -> dict[int, Parameter]:
    """Parameters that several modules own, one of which is no `Linear`: a head tied to an embedding.

    They would receive one gradient in the input pass and another in the weight pass, and their hooks would fire twice.
    """
    owners: dict[int, list[nn.Module]] = {}
    parameters: dict[int, Parameter] = {}
    for owner in module.modules():
        for parameter in owner._parameters.values():
            if parameter is not None:
                parameters[id(parameter)] = parameter
                owners.setdefault(id(parameter), []).append(owner)
    return {
        key: parameters[key]
        for key, modules in owners.items()
        if len(modules) > 1 and any(type(owner) is not nn.Linear for owner in modules)
    }


class Pending:
    """The weight work that one microbatch's forward and input pass leave behind. One owner, consumed once."""

    __slots__ = (
        "again",
        "batches",
        "deferral",
        "functions",
        "index",
        "kept",
        "phase",
        "records",
        "skip",
        "slots",
        "work",
    )

    def __init__(self, deferral: Deferral) -> None:
        self.deferral = deferral
        self.slots = deferral.slots
        self.skip = deferral.skip
        self.index = 0
        self.records: list[Any] = []  # slot, rows, version of the rows; slot, rows, ...: flat, to spare the collector
        self.work: list[Work] = []
        self.batches: list[tuple[Group, Tensor, Tensor]] = []
        self.kept: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = (
            None  # a backward that waits for the weight pass
        )
        self.again: Again | None = None
        self.functions: list[Call] = []  # calls that went through the autograd function
        self.phase = "forward"

    def __repr__(self) -> str:
        return f"Pending(phase={self.phase!r}, calls={len(self.calls())}, work={self.num_waiting})"

    @property
    def num_waiting(self) -> int:
        """Calls whose weight work waits for the weight pass."""
        return len(self.work) + sum(len(group.places) for group, _, _ in self.batches)

    def advance(self, phase: str, *, expected: str, verb: str) -> None:
        if self.phase != expected:
            raise StageError(
                f"{verb} needs weight work whose last phase is {expected!r}, got {self.phase!r}: "
                "each microbatch runs its forward, its input pass and its weight pass once, in this order"
            )
        self.phase = phase

    def harvest(self) -> None:
        """Take the gradients out of the anchors; the last call comes first, as in a backward."""
        if self.again is not None or self.functions or self.deferral.repeats or not self._harvest_groups():
            work = self.work
            backwards = iter(self.records[::-1])
            for version, rows, slot in zip(backwards, backwards, backwards, strict=True):
                grad = slot.anchor.grad
                if grad is not None:
                    slot.anchor.grad = None
                    if rows._version != version:
                        raise StageError(_changed(slot, rows))
                    work += ((slot.call, rows.data, grad),)
            self.work = grouped(work) if self.functions or self.deferral.repeats else work
        self.records, self.functions = [], []

    def _harvest_groups(self) -> bool:
        """The same for calls that were the same in the last microbatch. False, and nothing done, if they were not."""
        deferral, slots = self.deferral, self.records[::3]
        layout = deferral.layout
        if layout is None or layout.slots != slots:
            if deferral.last == slots:
                deferral.layout = Layout(slots)
            deferral.last = slots
            return False
        grads = [slot.anchor.grad for slot in slots]
        for grad in grads:
            if grad is None:
                return False
        rows, versions = self.records[1::3], self.records[2::3]
        if [row._version for row in rows] != versions:
            return False
        for slot in slots:
            slot.anchor.grad = None
        if layout.groups:
            self.batches = layout.harvest(rows, grads)
        for place in layout.singles[::-1]:
            self.work += ((slots[place].call, rows[place].data, grads[place]),)
        return True

    def calls(self) -> list[Call]:
        """What is deferred so far."""
        return [slot.call for slot in self.records[::3]] + self.functions

    def anchors(self) -> list[Tensor]:
        return [slot.anchor for slot in self.records[::3]]


def _changed(slot: Slot, rows: Tensor) -> str:
    return (
        f"the input of a linear layer with weight {tuple(slot.call.weight.shape)}, of shape {tuple(rows.shape)}, was "
        "changed in place after the layer had used it, so the gradient of the weight cannot be computed. "
        "Write `y = x + 1` instead of `x += 1` there, or give the layer a clone"
    )


class DeferredLinear(torch.autograd.Function):
    """A linear layer whose backward yields the gradient of its input and leaves the rest to the weight pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, root: Tensor, frozen: Tensor, bias: Tensor | None, call: Call, work: list[Work],
        operator: Operator,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, frozen)
        ctx.call, ctx.work = call, work
        return _apply(operator, x, frozen=frozen, bias=bias, fused=False)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, frozen = ctx.saved_tensors
        rows, row_grads = x, grad
        if grad.dim() != 2:
            rows, row_grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        ctx.work.append((ctx.call, rows.data, row_grads))
        input_grad = None
        if ctx.needs_input_grad[0]:
            input_grad = row_grads.mm(frozen.t() if ctx.call.transposed else frozen)
            if grad.dim() != 2:
                input_grad = input_grad.view(x.shape)
        return input_grad, None, None, None, None, None, None


def accumulate(work: list[Work], roots: tuple[Tensor, ...] = (), grads: tuple[Tensor, ...] = ()) -> None:
    """Compute weight gradients, bit for bit as autograd's backward of the operators does; the engine accumulates them.

    They go to the engine by and by, to be added while they are in the cache; together with `roots`, if there are any.
    """
    all_roots, all_grads = list(roots), list(grads)
    held = 0
    last = None
    for (weight, bias, transposed), rows, grad in work:
        if held >= ENGINE_CALL_BYTES and weight is not last and not roots:
            run_engine(tuple(all_roots), tuple(all_grads))
            all_roots, all_grads, held = [], [], 0
        last = weight
        if weight.requires_grad:
            gradient = rows.t().mm(grad) if transposed else grad.t().mm(rows)
            if gradient.dtype is not weight.dtype:
                gradient = gradient.to(weight.dtype)
            all_roots += (weight,)
            all_grads += (gradient,)
            held += gradient.nbytes
        if bias is not None and bias.requires_grad:
            gradient = grad.sum(0)
            if gradient.dtype is not bias.dtype:
                gradient = gradient.to(bias.dtype)
            all_roots += (bias,)
            all_grads += (gradient,)
    if all_roots:
        run_engine(tuple(all_roots), tuple(all_grads))


def accumulate_batches(batches: list[tuple[Group, Tensor, Tensor]]) -> None:
    """The same for groups of equal layers."""
    for group, rows, grads in batches:
        roots, gradients = group.parameters, group.gradients(rows, grads)
        for root in roots:
            if not root.requires_grad:  # frozen since the forward
                pairs = [(root, grad) for root, grad in zip(roots, gradients, strict=True) if root.requires_grad]
                roots, gradients = tuple(root for root, _ in pairs), tuple(grad for _, grad in pairs)
                break
        if roots:
            run_engine(roots, gradients)


def grouped(work: list[Work]) -> list[Work]:
    """The calls of one weight side by side, so that one engine call adds them up and its hooks fire once."""
    first: dict[int, int] = {}
    order = [first.setdefault(id(call.weight), position) for position, (call, _, _) in enumerate(work)]
    if len(first) == len(work):
        return work
    return [item for _, item in sorted(zip(order, work, strict=True), key=lambda pair: pair[0])]
