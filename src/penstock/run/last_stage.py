"""LastStage: what the last stage of a pipeline adds to its forwards: losses, and outputs if they are asked for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.batch.batch import Batch, Weights
from penstock.errors import ShapeError, StageError
from penstock.nest import Value, map_tensors


class OwnLoss:
    """The loss of a model that returns it (``labels=``): a part of its output, which `pick` takes out."""

    def __init__(self, pick: Callable[[Value], Tensor]) -> None:
        self.pick = pick

    def __call__(self, output: object, target: object = None) -> Tensor:
        return self.pick(output)


class LastStage:
    """The losses and the outputs of a step, by microbatch."""

    def __init__(self, num_microbatches: int, *, grad: bool) -> None:
        self.grad = grad
        self.shapes: list[torch.Size | None] = [None] * num_microbatches  # of losses, until the backward
        self.reported: list[Tensor | None] = [None] * num_microbatches  # of `board`, once they are there
        self.board: tuple[Tensor, ...] = ()  # a place for each loss of a step
        self.outputs: list[Value] = [None] * num_microbatches
        self.shares: Weights | None = None  # of the losses in that of the batch; None: they add up
        self.weights: Weights | None = None  # factors of the losses before their backward; None: all are 1
        self.open = False  # whether the first output is needed to know the shares
        self.uneven = False

    def begin(self, batch: Batch, *, uneven: bool) -> None:
        self.uneven, self.open = uneven, callable(batch.shares)
        if not callable(batch.shares):
            self.shares, self.weights = batch.shares, batch.weights(batch.shares)

    def finish(self, microbatch: int, output: object, inputs: Batch) -> Tensor | None:
        """After a forward: compute the loss, keep the output if it is asked for. Return the loss."""
        loss: Tensor | None = None
        if inputs.loss_fn is not None and inputs.targets is not None:
            copies, targets = inputs.copies, inputs.targets
            target = targets[microbatch] if copies is None else copies.of(targets, microbatch)
            if self.uneven:
                refuse_broadcast(output, target)
            loss = inputs.loss_fn(output, target, **inputs.loss_kwargs)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
                raise StageError(f"loss_fn returned {what}; expected a tensor with one number")
            if self.open and callable(inputs.shares):
                self.open, self.shares = False, inputs.shares(output, target)
                self.weights = inputs.weights(self.shares)
            if self.grad:
                self.shapes[microbatch] = loss.shape
            self.report(microbatch, loss.detach())
        if inputs.keep_outputs:
            self.outputs[microbatch] = detached(output) if self.grad else output
        return loss

    def report(self, microbatch: int, loss: Tensor) -> None:
        """Copy a loss: itself it could keep its input's memory alive. All of a step lie in one piece of memory, since many
        small ones that stay would break the memory that activations come and go in into pieces."""
        if type(loss) is not Tensor:  # a DTensor stays one
            self.reported[microbatch] = loss.clone()
            return
        if not self.board or self.board[0].dtype is not loss.dtype:
            self.board = torch.empty(len(self.reported), dtype=loss.dtype, device=loss.device).unbind()
        place = self.reported[microbatch] = self.board[microbatch]
        place.copy_(loss.reshape(()) if loss.shape else loss)

    def seed(self, microbatch: int) -> Tensor | None:
        """Return the gradient of the loss, which is its weight in the batch; None if there is no loss."""
        shape, self.shapes[microbatch] = self.shapes[microbatch], None
        loss = self.reported[microbatch]
        if shape is None or loss is None:
            return None
        weight = 1.0 if self.weights is None else self.weights[microbatch]
        if isinstance(weight, Tensor):  # a number on a device, which is not read
            return weight.to(loss.dtype).expand(shape)
        return torch.full_like(loss, weight).expand(shape)

    def results(self, inputs: Batch) -> tuple[list[Tensor], list[Value], Weights | None]:
        """Return losses and outputs of the step by microbatch, and the shares of the losses."""
        losses = [loss for loss in self.reported if loss is not None]
        return losses, list(self.outputs) if inputs.keep_outputs else [], self.shares

    def clear(self) -> None:
        for held in (self.shapes, self.reported, self.outputs):
            held[:] = [None] * len(held)
        self.board = ()
        self.shares = self.weights = None


def refuse_broadcast(output: object, target: object) -> None:
    """Input and target of this batch differ in rows: one row of a target must not silently count for several of the output.

    >>> refuse_broadcast(torch.zeros(2, 3), torch.zeros(1, 3))
    Traceback (most recent call last):
    penstock.errors.ShapeError: a microbatch has an output of shape [2, 3] and a target of shape [1, 3]; ...
    >>> refuse_broadcast(torch.zeros(2, 3, 5), torch.zeros(6))  # a loss that flattens its output
    """
    if not isinstance(output, Tensor) or not isinstance(target, Tensor) or not output.dim() or not target.dim():
        return
    counts = output.shape[0], target.shape[0]
    if output.shape[1:] == target.shape[1:] and 1 in counts and counts[0] != counts[1]:
        raise ShapeError(
            f"a microbatch has an output of shape {list(output.shape)} and a target of shape {list(target.shape)}; one row would "
            "count for all. Give a target for the rows of the input, or target_chunk_spec"
        )


def detached(value: object) -> Value:
    """The output without its graph; no copy."""
    return value.detach() if isinstance(value, Tensor) else map_tensors(Tensor.detach, value)
