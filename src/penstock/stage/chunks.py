"""One microbatch through one stage, driven by hand.

    output = stage.forward_one_chunk(0, (x,))
    stage.backward_one_chunk(0, loss=loss_fn(output, target))

Programs override these methods or call them; a schedule whose stages override one of them goes through all of them.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import ShapeError
from penstock.stage.backward import backward_input, backward_weight, run_backward_full, run_deferred
from penstock.stage.exchange import Exchange, as_tuple
from penstock.stage.keywords import accepted_keywords
from penstock.stage.metadata import validate_tensors_metadata

Grads = tuple[Tensor | None, ...]
_BACKWARDS = (
    "forward_maybe_with_nosync",
    "backward_maybe_with_nosync",
    "backward_one_chunk",
    "backward_weight_one_chunk",
)


class Chunks(Exchange):
    """Forward and backward."""

    @cached_property
    def _accepted(self) -> frozenset[str] | None:
        return accepted_keywords(self.submod)

    # -- forward

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,  # the microbatch
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,  # in `output_chunks`, on the last stage
    ) -> Any:
        """The forward of a microbatch. `args` are the model's own, for the first stage; the others have received theirs."""
        received = () if self.is_first else self._retrieve_recv_activations(fwd_chunk_id)
        inputs, keywords = self._call_of(received, args, kwargs or {})
        if self._runtime_validate:
            self._validate_stage_tensors("forward inputs", self._stage_meta.inputs, inputs)
        if self.has_backward and self._splits and self.dw_builder is None and self._owns_backward():
            output, self._pending[fwd_chunk_id] = run_deferred(self._deferral, self.submod, inputs, keywords)
        else:
            output = self.forward_maybe_with_nosync(*inputs, **keywords)
        outputs = as_tuple(output)
        if self.is_last and save_forward_output:
            self.output_chunks.append(
                pytree.tree_map_only(Tensor, Tensor.detach, output) if self.has_backward else output
            )
        known = set(map(id, received))
        others = [leaf for leaf in pytree.tree_leaves((inputs, keywords)) if id(leaf) not in known]
        self.fwd_cache[fwd_chunk_id] = outputs, [*received, *others]
        if self._runtime_validate and not self.is_last:
            self._validate_fwd_outputs(outputs)
        return output

    def _call_of(
        self, received: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the module is called with."""
        return tuple(args) if self.is_first else received, self._keywords(kwargs)

    def _keywords(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Those that the module takes."""
        return {name: value for name, value in kwargs.items() if self._accepted is None or name in self._accepted}

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; within a step its data parallelism is told by the schedule when to reduce."""
        with nullcontext() if self._in_step else self._no_sync():
            return self.submod(*args, **kwargs)

    def _no_sync(self) -> Any:
        no_sync = getattr(self.submod, "no_sync", None)
        return nullcontext() if no_sync is None else no_sync()

    def _owns_backward(self) -> bool:
        """Whether no subclass has a backward of its own, from which weight work must not be hidden."""
        return all(getattr(type(self), name) is getattr(Chunks, name) for name in _BACKWARDS)

    # -- backward

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """The backward of a microbatch: all of it, or what the stage before waits for, and the weights' part later."""
        if not self.has_backward:
            return
        self._check_chunk_id(bwd_chunk_id)
        outputs, inputs = self.fwd_cache.pop(bwd_chunk_id)
        grads = None if self.is_last else self._retrieve_recv_grads(bwd_chunk_id)
        if self._runtime_validate and grads is not None and self._stage_meta.output_grads is not None:
            validate_tensors_metadata(
                f"stage {self.stage_index}, output gradients", self._stage_meta.output_grads, grads
            )
        request = {"stage_output": loss if self.is_last else outputs, "output_grads": grads, "input_values": inputs}
        pending = self._pending.pop(bwd_chunk_id, None)
        kind = "full" if full_backward or pending is None else "input"
        found, _ = self.backward_maybe_with_nosync(kind, {**request, "pending": pending}, last_backward)
        if self.dw_builder is not None:
            runner = self.dw_builder()
            if full_backward:
                runner()
            else:
                self.dw_runner[bwd_chunk_id] = runner
        elif not full_backward:
            self.dw_runner[bwd_chunk_id] = _nothing
            self._pending[bwd_chunk_id] = pending
        known = self._stage_meta.inputs
        self.bwd_cache[bwd_chunk_id] = found if known is None else found[: len(known)]

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The weights' part of a backward that was split."""
        if not self.has_backward:
            return
        if bwd_chunk_id not in self.dw_runner:
            raise AssertionError(
                f"stage {self.stage_index}: the weight work of microbatch {bwd_chunk_id} is not there; expected "
                "backward_one_chunk(..., full_backward=False) for it before, and this once"
            )
        self.dw_runner.pop(bwd_chunk_id)()
        pending = self._pending.pop(bwd_chunk_id, None)
        if pending is not None:
            self.backward_maybe_with_nosync("weight", {"pending": pending}, last_backward)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[Grads, list[dict[str, Any]] | None]:
        """Do the "full", "input" or "weight" part of a backward; the gradients of the inputs come back."""
        pending = bwd_kwargs.get("pending")
        if backward_type == "weight":
            backward_weight(pending)  # type: ignore[arg-type]
            return (), None
        roots, grads = _roots(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"])
        inputs = bwd_kwargs["input_values"]
        with nullcontext() if self._in_step or last_backward else self._no_sync():
            if pending is None:
                run_backward_full(roots, grads)
            else:
                leaves = [value for value in inputs if isinstance(value, Tensor) and value.is_leaf]
                backward_input(roots, grads, pending, inputs=leaves)
                if backward_type == "full":
                    backward_weight(pending)
        known = self._stage_meta.inputs
        received = () if self.is_first else inputs if known is None else inputs[: len(known)]
        return (*map(_take_grad, received), *(None for _ in inputs[len(received) :])), None

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide the gradients. Within a step there is nothing to divide: the schedule has scaled the loss."""
        if self._in_step or grad_scale_factor == 1:
            return
        for parameter in self.submod.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(grad_scale_factor)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce the gradients over the data-parallel replicas, once all backwards are done."""
        if self._adapter is not None and self._adapter.reduces:
            self._adapter.reduce_grad()
        self.scale_grads(grad_scale_factor)

    # -- checks

    def _validate_fwd_input(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """The model's own arguments must look as in the first step; what other stages receive has a shape anyway."""
        if self.is_first:
            self._validate_stage_tensors("forward inputs", self._stage_meta.inputs, args)

    def _validate_fwd_outputs(self, outputs: tuple[Any, ...]) -> None:
        self._validate_stage_tensors("forward outputs", self._stage_meta.outputs, outputs)

    def _validate_stage_tensors(self, desc: str, expected: Any, actual: tuple[Any, ...]) -> None:
        if expected is None:
            raise ShapeError(f"stage {self.stage_index}, {desc}: nothing is known to compare them with")
        validate_tensors_metadata(f"stage {self.stage_index}, {desc}", expected, actual)


def _roots(stage_output: Any, output_grads: Any) -> tuple[list[Tensor], list[Tensor | None]]:
    """The outputs that a backward starts from, and their gradients; a loss starts with 1."""
    if isinstance(stage_output, Tensor):
        return [stage_output], [None if output_grads is None else output_grads]
    if stage_output is None:
        return [], []
    roots: list[Tensor] = []
    grads: list[Tensor | None] = []
    outputs = [output for output in stage_output if isinstance(output, Tensor)]
    for output, grad in zip(outputs, output_grads if output_grads is not None else [None] * len(outputs), strict=True):
        if output.requires_grad and (grad is not None or output_grads is None):
            roots.append(output)
            grads.append(torch.ones_like(output) if grad is None else grad)
    return roots, grads


def _take_grad(value: Any) -> Tensor | None:
    """The gradient that an input has gathered, taken from it."""
    if not isinstance(value, Tensor) or not value.is_leaf or value.grad is None:
        return None
    grad, value.grad = value.grad, None
    return grad


def _nothing() -> None:
    """Stands for weight work that the stage itself remembers."""
