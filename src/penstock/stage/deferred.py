"""Weight gradients of linear layers, put off: what one forward remembers, and what the weight pass makes of it.

A linear layer computes with an alias of its weight that needs no gradient, so that the input pass skips the weight. In
place of its bias stands an *anchor*: a leaf that looks like the bias repeated for every row. Autograd accumulates the
gradient of the layer's output in the anchor's `.grad` (it moves there, nothing is copied and no Python runs), whatever
happens to the output later: views, in-place activations, no use at all. A layer without bias gets an anchor of -0.0, which
changes no bit of a sum. The input and that gradient are all that the weight pass needs.

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
from penstock.stage.engine import run_engine

Operator = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Computes (rows, frozen weight, bias or anchor) -> output, for rows of two dimensions."""

ENGINE_CALL_BYTES = 64 << 20
"""Weight gradients handed to the engine at once: enough to make its cost vanish, few enough to spare memory."""


class Call(NamedTuple):
    """Which parameters one call of a linear operator used, and how."""

    weight: Parameter
    bias: Tensor | None
    transposed: bool  # the weight is (inputs, outputs), as `addmm` takes it; `linear` takes (outputs, inputs)


class Work(NamedTuple):
    """The weight work of one call: everything that is kept from the input pass to the weight pass."""

    call: Call
    rows: Tensor
    grad: Tensor


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

    def __init__(self, call: Call, input: Tensor, *, cast: torch.dtype | None) -> None:  # noqa: A002
        weight, bias, self.transposed = call
        self.call = call
        self.weight: Parameter | None = weight
        self.bias = bias
        self.shape = input.shape
        self.weight_pointer = weight.data_ptr()
        self.bias_pointer = 0 if bias is None else bias.data_ptr()
        self.cast = cast
        self.versions = _versions(weight, bias)
        self.frozen = weight.detach() if cast is None else weight.detach().to(cast)
        self.dtype = self.frozen.dtype
        width, features = weight.shape if self.transposed else (weight.shape[1], weight.shape[0])
        rows = input.numel() // width
        if bias is None:
            base = torch.full((), -0.0, dtype=self.dtype, device=weight.device)
        else:
            base = bias.detach().to(self.dtype)
        self.anchor = base.expand(rows, features).requires_grad_()
        self.rows_shape = None if input.dim() == 2 else (rows, width)
        self.output_shape = (*input.shape[:-1], features)

    def apply(self, operator: Operator, input: Tensor) -> tuple[Tensor, Tensor]:  # noqa: A002
        """The output, and the rows to keep for the weight pass."""
        if self.cast is not None:
            input = input.to(self.cast)
        return _apply(operator, input, frozen=self.frozen, bias=self.anchor, fused=self.bias is None)


class _Nothing(Slot):
    """Stands behind the last slot and matches no call."""

    __slots__ = ()

    def __init__(self) -> None:
        self.weight = None


def _versions(weight: Tensor, bias: Tensor | None) -> tuple[int, int]:
    return weight._version, -1 if bias is None else bias._version


def _apply(
    operator: Operator, input: Tensor, *, frozen: Tensor, bias: Tensor | None, fused: bool  # noqa: A002
) -> tuple[Tensor, Tensor]:
    """As torch does it with a weight that needs a gradient: one matrix product over rows, fused with the bias or not."""
    if input.dim() == 2:
        return operator(input, frozen, bias), input
    rows = input.reshape(-1, input.shape[-1])
    if fused or bias is None or input.is_contiguous():
        output = operator(rows, frozen, bias)
    else:
        output = operator(rows, frozen, None) + bias
    return output.view(*input.shape[:-1], output.shape[-1]), rows


class Deferral:
    """What a stage with a split backward keeps from microbatch to microbatch. One for each stage.

    `enabled` may be set to False: nothing is deferred then, and the input pass is the whole backward.
    """

    __slots__ = ("checked", "enabled", "proved", "skip", "slots")

    def __init__(self, module: nn.Module | None = None) -> None:
        self.slots: list[Slot] = [_Nothing()]
        self.skip: dict[int, Parameter] = {} if module is None else _tied_outside_linear(module)
        self.checked: dict[int, Parameter] = {}
        self.enabled = True
        self.proved = False  # a forward has run without differentiating inside itself

    def reset(self) -> None:
        """Forget the anchors: after an input pass that failed half-way some of them hold gradients."""
        self.slots = [_Nothing()]

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

    __slots__ = ("again", "deferral", "functions", "index", "kept", "phase", "records", "skip", "slots", "work")

    def __init__(self, deferral: Deferral) -> None:
        self.deferral = deferral
        self.slots = deferral.slots
        self.skip = deferral.skip
        self.index = 0
        self.records: list[tuple[Slot, Tensor, int]] = []
        self.work: list[Work] = []
        self.kept: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None  # a backward that waits for the weight pass
        self.again: Again | None = None
        self.functions: list[Call] = []  # calls that went through the autograd function
        self.phase = "forward"

    def __repr__(self) -> str:
        return f"Pending(phase={self.phase!r}, records={len(self.records)}, work={len(self.work)})"

    def advance(self, phase: str, *, expected: str, verb: str) -> None:
        if self.phase != expected:
            raise StageError(
                f"{verb} needs weight work whose last phase is {expected!r}, got {self.phase!r}: "
                "each microbatch runs its forward, its input pass and its weight pass once, in this order"
            )
        self.phase = phase

    def harvest(self) -> None:
        """Take the gradients out of the anchors; the last call comes first, as in a backward."""
        work = self.work
        for slot, rows, version in reversed(self.records):
            anchor = slot.anchor
            grad = anchor.grad
            if grad is not None:
                anchor.grad = None
                if rows._version != version:
                    raise StageError(_changed(slot, rows))
                work.append(Work(slot.call, rows.data, grad))
        self.records, self.functions = [], []

    def calls(self) -> list[Call]:
        """What is deferred so far."""
        return [slot.call for slot, _, _ in self.records] + self.functions


def _changed(slot: Slot, rows: Tensor) -> str:
    return (
        f"the input of a linear layer with weight {tuple(slot.call.weight.shape)}, of shape {tuple(rows.shape)}, was changed in "
        "place after the layer had used it, so the gradient of the weight cannot be computed. "
        "Write `y = x + 1` instead of `x += 1` there, or give the layer a clone"
    )


class DeferredLinear(torch.autograd.Function):
    """A linear layer whose backward yields the gradient of its input and leaves the rest to the weight pass."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, input: Tensor, root: Tensor, frozen: Tensor, bias: Tensor | None, call: Call, work: list[Work],  # noqa: A002, ARG004
        operator: Operator,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(input, frozen)
        ctx.call, ctx.work = call, work
        return _apply(operator, input, frozen=frozen, bias=bias, fused=False)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        input, frozen = ctx.saved_tensors  # noqa: A001
        rows, row_grads = input, grad
        if grad.dim() != 2:
            rows, row_grads = input.reshape(-1, input.shape[-1]), grad.reshape(-1, grad.shape[-1])
        ctx.work.append(Work(ctx.call, rows.data, row_grads))
        input_grad = None
        if ctx.needs_input_grad[0]:
            input_grad = row_grads.mm(frozen.t() if ctx.call.transposed else frozen)
            if grad.dim() != 2:
                input_grad = input_grad.view(input.shape)
        return input_grad, None, None, None, None, None, None


def weight_gradients(work: Work) -> list[tuple[Tensor, Tensor]]:
    """(parameter, gradient) of one call, bit for bit as autograd's own backward of the operator computes them."""
    (weight, bias, transposed), rows, grad = work
    found: list[tuple[Tensor, Tensor]] = []
    if weight.requires_grad:
        value = rows.t().mm(grad) if transposed else grad.t().mm(rows)
        found.append((weight, value if value.dtype is weight.dtype else value.to(weight.dtype)))
    if bias is not None and bias.requires_grad:
        value = grad.sum(0)
        found.append((bias, value if value.dtype is bias.dtype else value.to(bias.dtype)))
    return found


def accumulate(work: list[Work], roots: tuple[Tensor, ...] = (), grads: tuple[Tensor, ...] = ()) -> None:
    """Compute the weight gradients and let the engine accumulate them, together with what `roots` still owe."""
    all_roots, all_grads = list(roots), list(grads)
    held = 0
    work = _grouped(work)
    for position, item in enumerate(work):
        for parameter, gradient in weight_gradients(item):
            all_roots.append(parameter)
            all_grads.append(gradient)
            held += gradient.nbytes
        if held > ENGINE_CALL_BYTES and not roots and not _continues(work, position):
            run_engine(tuple(all_roots), tuple(all_grads))
            all_roots, all_grads, held = [], [], 0
    if all_roots:
        run_engine(tuple(all_roots), tuple(all_grads))


def _continues(work: list[Work], position: int) -> bool:
    return position + 1 < len(work) and work[position + 1].call.weight is work[position].call.weight


def _grouped(work: list[Work]) -> list[Work]:
    """The calls of one weight side by side, so that one engine call adds them up and its hooks fire once."""
    first: dict[int, int] = {}
    order = [first.setdefault(id(item.call.weight), position) for position, item in enumerate(work)]
    if len(first) == len(work):
        return work
    return [item for _, item in sorted(zip(order, work, strict=True), key=lambda pair: pair[0])]
